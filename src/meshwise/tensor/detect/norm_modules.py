"""Find the modules that normalise over the features, and their formula.

A split norm has to be computed by parts, so its formula must be known. Every library has a class of its own for the
same two formulas, and the name of a class proves nothing. So a copy of the module, with random gains, is run with
random numbers, and its output is compared with both:

    | (x - mean) / sqrt(variance + epsilon) · gain + bias        LayerNorm, Ba et al., 2016
    | x / sqrt(mean of squares + epsilon) · gain                  RMSNorm, Zhang & Sennrich, 2019

with the gain as it is stored or 1 more, in float64 or less exactly: then its statistics are taken in float32. In the
same way, a module that scales or shifts is run to see whether it does so feature by feature.
"""

import copy
import dataclasses
import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwise.tensor.core.part import Norm
from meshwise.tensor.detect.matrix_modules import output_of, random_numbers

_ROWS = 3
_EXACT, _NEAR = 1e-12, 1e-5
_USUAL = (1e-5, 1e-6, 1e-8, 1e-12, 1e-30)
"""Epsilons that a forward may use without an attribute; the last stands for none, as in `functional.normalize`."""


def as_norm(module: nn.Module) -> tuple[int, Norm] | None:
    """Return the features that a module normalises over, and how; None when it agrees with none of the formulas.

    Looks at modules without children whose parameters are vectors of one size, and at torch's own without parameters.
    """
    width = _width(module)
    if width is None:
        return None
    asked, x_RW = _with_random_parameters(module), _random(_ROWS, width)
    answer = _answer(asked, x_RW)
    if answer is None:
        return None
    kept, near = _kept(module), None
    for norm in _candidates(module):
        expected = _compute(norm, x_RW, asked._parameters)
        if torch.allclose(expected, answer.double(), rtol=_EXACT, atol=_EXACT):
            return width, norm
        if near is None and torch.allclose(expected, answer.double(), rtol=_NEAR, atol=_NEAR):
            near = dataclasses.replace(norm, statistics=torch.float32)
            if norm.epsilon in kept:
                break
    return None if near is None else (width, near)


def goes_feature_by_feature(module: nn.Module) -> bool:
    """Return whether a module without children mixes no features: half of them give half of the output."""
    width = _width(module)
    if width is None or width < 2:
        return False
    asked, x_RW = _with_random_parameters(module), _random(_ROWS, width)
    whole = _answer(asked, x_RW)
    for name, parameter in list(asked.named_parameters(recurse=False)):
        asked._parameters[name] = nn.Parameter(parameter[: width // 2], requires_grad=False)
    half = _answer(asked, x_RW[:, : width // 2])
    return whole is not None and half is not None and torch.equal(whole[:, : width // 2], half)


def _random(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers so small that an epsilon is no smaller than what it is added to."""
    return (random_numbers(*shape, seed=seed) + 1) * 1e-3


def _answer(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return the output of a module for `x` if that is a tensor of the same shape, or None."""
    answer = output_of(module, x=x)
    return answer if isinstance(answer, Tensor) and answer.shape == x.shape else None


def _width(module: nn.Module) -> int | None:
    if any(True for _ in module.children()):
        return None
    shapes = {tuple(parameter.shape) for parameter in module.parameters(recurse=False)}
    normalized = getattr(module, "normalized_shape", None)
    if not shapes and isinstance(normalized, tuple | list):
        shapes = {tuple(normalized)}
    [shape] = shapes if len(shapes) == 1 else [()]
    return shape[0] if len(shape) == 1 else None


def _with_random_parameters(module: nn.Module) -> nn.Module:
    asked = copy.deepcopy(module)
    for place, (name, parameter) in enumerate(list(asked.named_parameters(recurse=False)), start=1):
        asked._parameters[name] = nn.Parameter(_random(*parameter.shape, seed=place) * 1e3, requires_grad=False)
    return asked


def _kept(module: nn.Module) -> list[float]:
    """Return the small positive numbers that a module keeps."""
    return [value for value in vars(module).values() if type(value) is float and 0 < value < 1]


def _candidates(module: nn.Module) -> list[Norm]:
    """Return both formulas with every small positive number that the module keeps, and the usual ones; a gain and a
    bias by any names.
    """
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    usual = set(names) <= {"weight", "bias"}
    pairs = [("weight", "bias")] if usual else list(itertools.permutations([*names, ""], 2))
    return [
        Norm(centred, epsilon, offset=offset, gain=gain, bias=bias)
        for epsilon in dict.fromkeys([*_kept(module), None, *_USUAL])
        for centred in (True, False)
        for offset in (0.0, 1.0)
        for gain, bias in pairs
    ]


def _compute(norm: Norm, x: Tensor, parameters: Mapping[str, Tensor | None]) -> Tensor:
    epsilon = torch.finfo(x.dtype).eps if norm.epsilon is None else norm.epsilon
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    gain, bias = parameters.get(norm.gain), parameters.get(norm.bias)
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    scaled = normal if gain is None else normal * (gain + norm.offset)
    return scaled if bias is None else scaled + bias

"""Find the modules that compute LayerNorm or RMSNorm over the features, and the exact formula of each.

This library computes a norm over split features itself, so it must know the norm's formula. Every library has its own
classes for the same two formulas, and the name of a class proves nothing. So a copy of the module, with random
parameters, is run on random numbers, and its output is compared with both formulas:

    | (x - mean) / sqrt(variance + epsilon) · gain + bias        LayerNorm, Ba et al., 2016
    | x / sqrt(mean of squares + epsilon) · gain + bias          RMSNorm, Zhang & Sennrich, 2019 (without bias)

The gain may be the stored parameter, or 1 + the stored parameter. The input is float64. A module that agrees only to
1e-5 is assumed to compute its statistics in float32. Other modules without children, such as a scale or shift, are run
too, to find out if they mix features."""

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
"""Epsilons to try that no attribute shows; the last one is for a norm without epsilon."""


def as_norm(module: nn.Module) -> tuple[int, Norm] | None:
    """Return the number of features that a module normalises over, and its formula; None if it is no such norm.

    A norm has no children. Its parameters are vectors of one size, or it has none and a `normalized_shape` of one dim.
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


def mixes_no_features(module: nn.Module) -> bool:
    """Return whether no output feature depends on another input feature; to test this, half of them run alone."""
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
    """Return random numbers near 1e-3. Their squares are as small as usual epsilons, so the output shows an epsilon."""
    return (random_numbers(*shape, seed=seed) + 1) * 1e-3


def _answer(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return the output of a module for `x` if the output is a tensor as large as `x`; else None."""
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
    """Return the numbers between 0 and 1 among a module's attributes; its epsilon may be one of them."""
    return [value for value in vars(module).values() if type(value) is float and 0 < value < 1]


def _candidates(module: nn.Module) -> list[Norm]:
    """Return all formulas to try: each epsilon with both norms, gain or 1 + gain, and all names of gain and bias."""
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
    """Return the output of a norm with this formula and these parameters for `x`."""
    epsilon = torch.finfo(x.dtype).eps if norm.epsilon is None else norm.epsilon
    if norm.centred:
        x = x - x.mean(-1, keepdim=True)
    gain, bias = parameters.get(norm.gain), parameters.get(norm.bias)
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    scaled = normal if gain is None else normal * (gain + norm.offset)
    return scaled if bias is None else scaled + bias

"""Find linear layers, embeddings and norms by what they compute, and the exact formula of each norm.

A split module gets a new forward, so a subclass of nn.Linear or nn.Embedding that computes something else must not be
split. One with its own forward is run on random numbers, and compared with torch's class (`as_matrix`,
`returns_table_rows`).

A norm over split features is computed here. No class name proves its formula (`as_norm`), so a copy of the module, with
random parameters, is run on random numbers and compared with both:

    | (x - mean) / sqrt(variance + epsilon) · gain + bias        LayerNorm, Ba et al., 2016
    | x / sqrt(mean of squares + epsilon) · gain + bias          RMSNorm, Zhang & Sennrich, 2019 (without bias)

The gain may be the stored parameter, or 1 + the stored parameter. The input is float64. A module that agrees only to
1e-5 is assumed to compute its statistics in float32. Other modules without children, such as a scale or shift, are run
too, to find out if they mix features (`mixes_no_features`)."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.tensor.core.module_role import Norm
from meshwise.tensor.detect.attention_names import STORED_AS_INPUTS_BY_OUTPUTS, full_name

_ROWS = 3
_EXACT, _NEAR = 1e-12, 1e-5
_USUAL = (1e-5, 1e-6, 1e-8, 1e-12, 1e-30)
"""Epsilons to try besides the numbers in a norm's attributes; the last one is for a norm without epsilon."""

PATCH_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Classes of convolutions; a model may use one as its first layer, to make hidden states from patches of an image."""


@dataclass(frozen=True)
class MatrixModule:
    """Linear layer `name` that maps (..., inputs) to (..., outputs)."""

    name: str
    inputs: int
    outputs: int

    weight_is_transposed: bool = False
    """True if the weight is stored as (inputs, outputs), where nn.Linear has (outputs, inputs)."""

    @property
    def parent_name(self) -> str:
        """Name of the module that holds the matrix."""
        return self.name.rpartition(".")[0]

    @property
    def own_name(self) -> str:
        """Name of the matrix in the module that holds it."""
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.name} ({self.inputs} -> {self.outputs})"


def as_matrix(module: nn.Module, *, name: str) -> MatrixModule | None:
    """Return a description of `module`, called `name`, if it computes a linear layer; else None."""
    if full_name(type(module)) in STORED_AS_INPUTS_BY_OUTPUTS:
        inputs, outputs = module.get_parameter("weight").shape
        return MatrixModule(name, inputs, outputs, weight_is_transposed=True)
    if isinstance(module, nn.Linear) and (computes_as(module, kind=nn.Linear) or _multiplies(module)):
        return MatrixModule(name, module.in_features, module.out_features)
    return None


def _multiplies(module: nn.Linear) -> bool:
    """Return whether a linear with its own forward returns the output of nn.Linear, for small random matrices."""
    if module._modules or module._buffers or set(module._parameters) != {"weight", "bias"}:
        return False
    x, weight, bias = _random_numbers(4, 3), _random_numbers(2, 3, seed=1), _random_numbers(2, seed=2)
    given = bias if module.bias is not None else None
    asked = copy.copy(module)
    asked.training, asked.in_features, asked.out_features = True, 3, 2
    asked._parameters = {"weight": nn.Parameter(weight), "bias": None if given is None else nn.Parameter(given)}
    expected = functional.linear(x, weight, given)
    output = _output(asked, x, shape=expected.shape)
    return output is not None and torch.allclose(output, expected, rtol=1e-12, atol=1e-12)


def _random_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return a float64 tensor of normal random numbers, equal in every call with the same seed."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _output(module: nn.Module, x: Tensor, *, shape: torch.Size) -> Tensor | None:
    """Return the result of the module's forward for `x`, without hooks; None if it raises or returns another shape."""
    try:
        with torch.no_grad():
            output = type(module).forward(module, x)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None
    return output if isinstance(output, Tensor) and output.shape == shape else None


def computes_as(module: nn.Module, *, kind: type[nn.Module]) -> bool:
    """Return whether a module is an instance of `kind` and does not override its forward."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def returns_table_rows(module: nn.Module) -> bool:
    """Return whether a module is an embedding that returns rows of its table, or a constant multiple of the rows."""
    if not isinstance(module, nn.Embedding) or computes_as(module, kind=nn.Embedding):
        return isinstance(module, nn.Embedding)
    own = type(module)
    asked = copy.copy(module)
    asked.__class__ = type(own.__name__, (own, _ConstantEmbedding), {})
    rows = _random_numbers(2, 3, 4)
    output = _output(asked, torch.zeros(2, 3, dtype=torch.long), shape=rows.shape)
    return output is not None and torch.allclose(output, rows * (output / rows).mean(), rtol=1e-12, atol=0)


class _ConstantEmbedding(nn.Embedding):
    """Embedding that returns the same random rows for every input, to test a subclass that calls super().forward."""

    def forward(self, _numbers: Tensor) -> Tensor:
        return _random_numbers(2, 3, 4)


def matrices(module: nn.Module, *, name: str) -> Iterator[MatrixModule]:
    """Yield the linear layers in a module called `name`, itself included, in the order of registration."""
    for inner, child in module.named_modules(prefix=name):
        if matrix := as_matrix(child, name=inner):
            yield matrix


def as_norm(module: nn.Module) -> tuple[int, Norm] | None:
    """Return the number of features that a norm normalises over, and its formula; None if `module` is no such norm.

    A norm has no children. Its parameters are vectors of one size; if it has none, `normalized_shape` has one dim."""
    width = _width(module)
    if width is None:
        return None
    asked, x_RW = _with_random_parameters(module), _small_random(_ROWS, width)
    x_BRW = x_RW[None]  # GroupNorm takes the second of three dims for the features
    answer = _output(asked, x_BRW, shape=x_BRW.shape)
    if answer is None:
        return None
    answer, own_epsilons, near = answer[0], _possible_epsilons(module), None
    for norm in _candidates(module):
        expected = _compute(norm, x_RW, asked._parameters)
        if torch.allclose(expected, answer.double(), rtol=_EXACT, atol=_EXACT):
            return width, norm
        if near is None and torch.allclose(expected, answer.double(), rtol=_NEAR, atol=_NEAR):
            near = dataclasses.replace(norm, statistics=torch.float32)
            if norm.epsilon in own_epsilons:
                break
    return None if near is None else (width, near)


def mixes_no_features(module: nn.Module) -> bool:
    """Return whether no output feature depends on another input feature, by a run on half of the features."""
    width = _width(module)
    if width is None or width < 2:
        return False
    asked, x_RW = _with_random_parameters(module), _small_random(_ROWS, width)
    whole, x_half = _output(asked, x_RW, shape=x_RW.shape), x_RW[:, : width // 2]
    for name, parameter in list(asked.named_parameters(recurse=False)):
        asked._parameters[name] = nn.Parameter(parameter[: width // 2], requires_grad=False)
    half = _output(asked, x_half, shape=x_half.shape)
    return whole is not None and half is not None and torch.equal(whole[:, : width // 2], half)


def _small_random(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers near 1e-3. Their squares are as small as usual epsilons, so the output shows an epsilon."""
    return (_random_numbers(*shape, seed=seed) + 1) * 1e-3


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
        asked._parameters[name] = nn.Parameter(_small_random(*parameter.shape, seed=place) * 1e3, requires_grad=False)
    return asked


def _possible_epsilons(module: nn.Module) -> list[float]:
    """Return the numbers between 0 and 1 among a module's attributes."""
    return [value for value in vars(module).values() if type(value) is float and 0 < value < 1]


def _candidates(module: nn.Module) -> list[Norm]:
    """Return all formulas to try: each epsilon with both norms, gain or 1 + gain, and all names of gain and bias."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    usual = set(names) <= {"weight", "bias"}
    pairs = [("weight", "bias")] if usual else list(itertools.permutations([*names, ""], 2))
    return [
        Norm(centred, epsilon, offset=offset, gain=gain, bias=bias)
        for epsilon in dict.fromkeys([*_possible_epsilons(module), None, *_USUAL])
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

"""Find the modules that are matrices: they multiply the last dim of their input, add a bias, and do nothing else.

A split module gets a new forward. So a subclass of nn.Linear or nn.Embedding that computes something else (a linear
with adapters) must not be split. To find out, a subclass with its own forward is run on random numbers, and its output
is compared with the output of torch's class."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.tensor.detect.known_names import STORED_AS_INPUTS_BY_OUTPUTS, full_name

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
    """Return a description of `module`, called `name`, if it is a matrix; else None."""
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
    x, weight, bias = random_numbers(4, 3), random_numbers(2, 3, seed=1), random_numbers(2, seed=2)
    given = bias if module.bias is not None else None
    asked = copy.copy(module)
    asked.training, asked.in_features, asked.out_features = True, 3, 2
    asked._parameters = {"weight": nn.Parameter(weight), "bias": None if given is None else nn.Parameter(given)}
    output, expected = output_of(asked, x=x), functional.linear(x, weight, given)
    return _same_shape(output, expected) and torch.allclose(output, expected, rtol=1e-12, atol=1e-12)


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return a float64 tensor of normal random numbers, equal in every call with the same seed."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def output_of(module: nn.Module, *, x: Tensor) -> Any:
    """Return the result of the module's forward for `x`, without hooks; None if the forward raises."""
    try:
        with torch.no_grad():
            return type(module).forward(module, x)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None


def _same_shape(output: Any, expected: Tensor) -> bool:
    return isinstance(output, Tensor) and output.shape == expected.shape


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
    output, rows = output_of(asked, x=torch.zeros(2, 3, dtype=torch.long)), random_numbers(2, 3, 4)
    return _same_shape(output, rows) and torch.allclose(output, rows * (output / rows).mean(), rtol=1e-12, atol=0)


class _ConstantEmbedding(nn.Embedding):
    """Embedding that returns the same random rows for every input, to test a subclass that calls super().forward."""

    def forward(self, _numbers: Tensor) -> Tensor:
        return random_numbers(2, 3, 4)


def matrices(module: nn.Module, *, name: str) -> Iterator[MatrixModule]:
    """Yield the matrices in a module called `name`, itself included, in the order of registration."""
    for inner, child in module.named_modules(prefix=name):
        if matrix := as_matrix(child, name=inner):
            yield matrix

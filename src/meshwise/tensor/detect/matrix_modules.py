"""Find the modules that are matrices: they multiply the last dim of their input, and do nothing else.

A part replaces the forward of a module. So a subclass of a torch class that computes something else (a linear with
adapters) is not treated as torch's. A linear that computes the same by other code is: it is run with random numbers.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.tensor.detect.known_names import STORED_AS_INPUTS_BY_OUTPUTS, full_name

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class MatrixModule:
    """A module that maps (..., inputs) to (..., outputs)."""

    name: str
    inputs: int
    outputs: int

    flipped: bool = False
    """True if the weight is (inputs, outputs), where a linear layer's is (outputs, inputs)."""

    @property
    def home(self) -> str:
        """Name of the module that holds the matrix."""
        return self.name.rpartition(".")[0]

    @property
    def child(self) -> str:
        """Name of the matrix in that module."""
        return self.name.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.name} ({self.inputs} -> {self.outputs})"


def as_matrix(module: nn.Module, *, name: str) -> MatrixModule | None:
    """Return the module as a matrix, or None when it is something else."""
    if full_name(type(module)) in STORED_AS_INPUTS_BY_OUTPUTS:
        inputs, outputs = module.get_parameter("weight").shape
        return MatrixModule(name, inputs, outputs, flipped=True)
    if isinstance(module, nn.Linear) and (computes_as(module, kind=nn.Linear) or _multiplies(module)):
        return MatrixModule(name, module.in_features, module.out_features)
    return None


def _multiplies(module: nn.Linear) -> bool:
    """Return whether a linear with a forward of its own returns what torch's does, for small random numbers."""
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
    """Return float64 numbers from a normal distribution, the same in every call with this seed."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def output_of(module: nn.Module, *, x: Tensor) -> Any:
    """Return the output of a module's class for `x`, without hooks; None when it takes something else."""
    try:
        with torch.no_grad():
            return type(module).forward(module, x)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None


def _same_shape(output: Any, expected: Tensor) -> bool:
    return isinstance(output, Tensor) and output.shape == expected.shape


def computes_as(module: nn.Module, *, kind: type[nn.Module]) -> bool:
    """Return whether a module is of a kind and has its forward."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def looks_up(module: nn.Module) -> bool:
    """Return whether a module returns what torch's embedding does, or a multiple of it, for random numbers."""
    if not isinstance(module, nn.Embedding) or computes_as(module, kind=nn.Embedding):
        return isinstance(module, nn.Embedding)
    own = type(module)
    asked = copy.copy(module)
    asked.__class__ = type(own.__name__, (own, _ConstantEmbedding), {})
    output, rows = output_of(asked, x=torch.zeros(2, 3, dtype=torch.long)), random_numbers(2, 3, 4)
    return _same_shape(output, rows) and torch.allclose(output, rows * (output / rows).mean(), rtol=1e-12, atol=0)


class _ConstantEmbedding(nn.Embedding):
    """An embedding that returns the same random rows for any numbers."""

    def forward(self, _numbers: Tensor) -> Tensor:
        return random_numbers(2, 3, 4)


def matrices(module: nn.Module, *, name: str) -> Iterator[MatrixModule]:
    """Yield the matrices inside a module called `name`, in the order in which they were registered."""
    for inner, child in module.named_modules(prefix=name):
        if matrix := as_matrix(child, name=inner):
            yield matrix

"""Which modules are matrices: they multiply the last dim of what they are given, and do nothing else.

A part replaces the forward of the module that plays it. So a subclass of a torch class that computes something else (an
embedding that scales, a linear with adapters) is not taken for torch's. A linear that computes the same by other code
is.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

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
    """Whether its weight is (inputs, outputs), where a linear layer's is (outputs, inputs)."""

    @property
    def home(self) -> str:
        """The name of the module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def child(self) -> str:
        """Its name there."""
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
    """Return whether a linear with a forward of its own computes what torch's does: it is asked, with small random
    numbers.
    """
    if module._modules or module._buffers or set(module._parameters) != {"weight", "bias"}:
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in ((4, 3), (2, 3), (2,))
    )
    given = bias if module.bias is not None else None
    asked = copy.copy(module)
    asked.training, asked.in_features, asked.out_features = True, 3, 2
    asked._parameters = {"weight": nn.Parameter(weight), "bias": None if given is None else nn.Parameter(given)}
    try:
        with torch.no_grad():
            answer = type(module).forward(asked, x)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return False  # it takes something else
    expected = functional.linear(x, weight, given)
    return answer.shape == expected.shape and torch.allclose(answer, expected, rtol=1e-12, atol=1e-12)


def computes_as(module: nn.Module, *, kind: type[nn.Module]) -> bool:
    """Return whether a module is of a kind and has its forward."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def looks_up(module: nn.Module) -> bool:
    """Return whether a module is an embedding, or scales what an embedding gives: it is asked, with random numbers."""
    if not isinstance(module, nn.Embedding) or computes_as(module, kind=nn.Embedding):
        return isinstance(module, nn.Embedding)
    own = type(module)
    asked = copy.copy(module)
    asked.__class__ = type(own.__name__, (own, _Gives), {})
    try:
        with torch.no_grad():
            answer = asked(torch.zeros(2, 3, dtype=torch.long))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return False  # it takes something else
    given = _Gives.numbers()
    scale = float(answer.flatten()[0] / given.flatten()[0])
    return answer.shape == given.shape and torch.allclose(answer, given * scale, rtol=1e-12, atol=0)


class _Gives(nn.Embedding):
    """An embedding that gives the same numbers, whatever it looks up."""

    @staticmethod
    def numbers() -> Tensor:
        generator = torch.Generator("cpu").manual_seed(0)
        return torch.randn(2, 3, 4, generator=generator, dtype=torch.float64, device="cpu")

    def forward(self, _numbers: Tensor) -> Tensor:
        return self.numbers()


def matrices(module: nn.Module, *, name: str) -> Iterator[MatrixModule]:
    """Yield the matrices inside a module called `name`, in the order in which they were registered."""
    for inner, child in module.named_modules(prefix=name):
        if matrix := as_matrix(child, name=inner):
            yield matrix

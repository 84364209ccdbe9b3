"""Which modules are matrices: they multiply the last dim of what they are given, and do nothing else.

A part replaces the forward of the module that plays it. So a class that derives from one of torch's and computes
something of its own (an embedding that scales, a linear with adapters) is not taken for torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from meshwise.tensor.families.known import STORED_AS_INPUTS_BY_OUTPUTS, full_name

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Matrix:
    """A module that maps (..., inputs) to (..., outputs)."""

    name: str
    inputs: int
    outputs: int

    flipped: bool = False
    """Whether its weight is (inputs, outputs), where a linear layer's is (outputs, inputs)."""

    def __str__(self) -> str:
        return f"{self.name} ({self.inputs} -> {self.outputs})"


def as_matrix(module: nn.Module, *, name: str) -> Matrix | None:
    """The module as a matrix, or None when it is something else."""
    if full_name(type(module)) in STORED_AS_INPUTS_BY_OUTPUTS:
        inputs, outputs = module.get_parameter("weight").shape
        return Matrix(name, inputs, outputs, flipped=True)
    if isinstance(module, nn.Linear) and computes_as(module, kind=nn.Linear):
        return Matrix(name, module.in_features, module.out_features)
    return None


def computes_as(module: nn.Module, *, kind: type[nn.Module]) -> bool:
    """Whether a module is of a kind and has its forward."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def matrices(module: nn.Module, *, name: str) -> Iterator[Matrix]:
    """The matrices inside a module called `name`, in the order in which they were registered."""
    for inner, child in module.named_modules(prefix=name):
        if matrix := as_matrix(child, name=inner):
            yield matrix

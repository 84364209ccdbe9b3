"""Logical tensors for optimizers that need more than single elements, however parameters are split.

An optimizer under a plan updates flat slices: parts of one or more parameters. A class that needs norms of whole
parameters (LARS, LAMB) or whole matrices (Muon, Shampoo) says so, and asks for them:

    class Normed(torch.optim.Optimizer):
        needs = "norms"                     # or "matrices"

        def __init__(self, params, *, logical, lr):
            super().__init__(params, {"lr": lr})
            self.logical = logical

        def step(self):
            gradients = {p: p.grad for group in self.param_groups for p in group["params"]}
            squares = self.logical.squared_norms(gradients)
            for group in self.param_groups:
                for p in group["params"]:
                    for part in self.logical.parts(p):
                        here = slice(part.start, part.stop)
                        step = gradients[p].view(-1)[here] / squares[part.name].sqrt()
                        p.data.view(-1)[here] -= group["lr"] * step

`logical` is a `LogicalTensors`: `WholeParameters` on one process, `LogicalSlices` under a plan. Every rank calls its
methods in the same order, and every slice has a gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SlicePart:
    """Elements [start, stop) of an optimizer's slice, which belong to the parameter `name`."""

    name: str
    start: int
    stop: int


NEEDS = ("norms", "matrices")
"""Values of an optimizer class's `needs`. Both give the same access; the word tells readers which is used."""


class LogicalTensors(Protocol):
    """Access of an optimizer to logical parameters. `values` are tensors of the shapes of the slices, by slice."""

    def parts(self, parameter: nn.Parameter) -> Sequence[SlicePart]:
        """Return which elements of a slice belong to which parameter, in order; padding belongs to none."""

    def squared_norms(self, values: Mapping[nn.Parameter, Tensor]) -> Mapping[str, Tensor]:
        """Return the squared 2-norm of `values` over each whole parameter, by name: fp64 scalars (a collective)."""

    def whole(self, values: Mapping[nn.Parameter, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield `values` of each parameter as its full tensor, and write back what the caller changes in it.

        Iterate to the end: each full tensor comes of a collective. With a pipeline, a rank's own stages only.
        """


class WholeParameters:
    """Logical tensors of one process, whose slices are the parameters themselves."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}

    def parts(self, parameter: nn.Parameter) -> Sequence[SlicePart]:
        """Return the whole slice as one part."""
        return (SlicePart(self._names[parameter], 0, parameter.numel()),)

    def squared_norms(self, values: Mapping[nn.Parameter, Tensor]) -> Mapping[str, Tensor]:
        """Return the squared 2-norms of the tensors, by name."""
        return {self._names[key]: torch.linalg.vector_norm(value).double() ** 2 for key, value in values.items()}

    def whole(self, values: Mapping[nn.Parameter, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors themselves, by name."""
        for parameter, value in values.items():
            yield self._names[parameter], value

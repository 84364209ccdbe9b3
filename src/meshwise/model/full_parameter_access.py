"""Interface that gives an optimizer norms or full tensors of parameters that are split over ranks.

An optimizer under a plan updates flat slices: parts of one or more parameters. A class that needs norms of whole
parameters (LARS, LAMB) or whole matrices (Muon, Shampoo) sets `needs`, and receives the argument `logical`:

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

`logical` is a `LogicalTensors`: `WholeParameters` on one process, `LogicalSlices` under a plan. Every rank must call
its methods in the same order. Every slice has a gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SlicePart:
    """Elements [start, stop) of an optimizer's flat slice; they belong to the parameter `name`."""

    name: str
    start: int
    stop: int


NEEDS = ("norms", "matrices")
"""Allowed values of `needs` in an optimizer class. Both give the same access; the value is documentation."""


class LogicalTensors(Protocol):
    """Access of an optimizer to whole parameters. `values`: a tensor for each slice, for example its gradient."""

    def parts(self, parameter: nn.Parameter) -> Sequence[SlicePart]:
        """Return the parts of a slice in order, each of one parameter; padding belongs to no part."""

    def squared_norms(self, values: Mapping[nn.Parameter, Tensor]) -> Mapping[str, Tensor]:
        """Return the squared 2-norm of `values` over each whole parameter, by name: fp64 scalars (a collective)."""

    def whole(self, values: Mapping[nn.Parameter, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, full tensor of `values`); changes that the caller makes to it go back to `values`.

        Every rank must iterate to the end, because each full tensor is gathered by a collective. With a pipeline, a
        rank gets the parameters of its own stages.
        """


class WholeParameters:
    """`LogicalTensors` of one process, where a slice is a parameter itself."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}

    def parts(self, parameter: nn.Parameter) -> Sequence[SlicePart]:
        """Return one part, the whole parameter."""
        return (SlicePart(self._names[parameter], 0, parameter.numel()),)

    def squared_norms(self, values: Mapping[nn.Parameter, Tensor]) -> Mapping[str, Tensor]:
        """Return the squared 2-norms of the tensors: fp64 scalars by parameter name."""
        return {self._names[key]: torch.linalg.vector_norm(value).double() ** 2 for key, value in values.items()}

    def whole(self, values: Mapping[nn.Parameter, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, tensor) with the tensors of `values` themselves."""
        for parameter, value in values.items():
            yield self._names[parameter], value

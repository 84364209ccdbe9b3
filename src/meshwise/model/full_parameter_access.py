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

A class that needs matrices computes each of them on one rank, by a function of the name and the full tensor:

    self.logical.map_whole(gradients, groups=self.param_groups, function=lambda name, full: orthogonal(full))

`logical` is a `LogicalTensors`: a `WholeParameters` on one process, a `LogicalSlices` under a plan. Every rank must
call its methods in the same order. Every slice has a gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SlicePart:
    """Elements [start, stop) of an optimizer's flat slice: part of the parameter `name` of full shape `shape`."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


WholeFunction: TypeAlias = Callable[[str, Tensor], Tensor]
"""Function from a parameter's name and a full tensor of the parameter's shape to a new tensor of this shape."""

Groups: TypeAlias = Sequence[Mapping[str, Any]]
"""Parameter groups of an optimizer (`optimizer.param_groups`), or some of them."""


NEEDS = ("norms", "matrices")
"""Allowed values of `needs` in an optimizer class. Both give the same access; the value is documentation."""


class LogicalTensors(Protocol):
    """Access of an optimizer to whole parameters. `values`: a tensor for each slice, for example its gradient."""

    def parts(self, parameter: nn.Parameter) -> Sequence[SlicePart]:
        """Return the parts of a slice in order, each of one parameter; padding belongs to no part."""

    def squared_norms(self, values: Mapping[nn.Parameter, Tensor]) -> Mapping[str, Tensor]:
        """Return the squared 2-norm of `values` over each whole parameter, by name: fp64 scalars (a collective)."""

    def map_whole(
        self,
        values: Mapping[nn.Parameter, Tensor],
        *,
        groups: Groups,
        function: WholeFunction,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Replace the `values` of each whole parameter of `groups` by `function` of them (collectives).

        | values    a tensor of the shape of each slice of `groups`, by slice; it is overwritten
        | groups    parameter groups of the optimizer: the same on every rank, even if the rank has no slice of them
        | dtype     dtype in which tensors travel, and which `function` gets; None: the dtype of the slices

        `function` runs on one rank for each parameter, so it must depend on its arguments alone."""


class WholeParameters:
    """`LogicalTensors` of one process, where a slice is a parameter itself."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}

    def parts(self, parameter: nn.Parameter) -> Sequence[SlicePart]:
        """Return one part, the whole parameter."""
        return (SlicePart(self._names[parameter], 0, parameter.numel(), tuple(parameter.shape)),)

    def squared_norms(self, values: Mapping[nn.Parameter, Tensor]) -> Mapping[str, Tensor]:
        """Return the squared 2-norms of the tensors: fp64 scalars by parameter name."""
        return {self._names[key]: torch.linalg.vector_norm(value).double() ** 2 for key, value in values.items()}

    def map_whole(
        self,
        values: Mapping[nn.Parameter, Tensor],
        *,
        groups: Groups,  # noqa: ARG002 - they say which parameters other ranks have
        function: WholeFunction,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Replace each tensor of `values` by `function` of it."""
        for parameter, value in values.items():
            value.copy_(function(self._names[parameter], value.to(dtype or value.dtype)))

"""Interface that gives an optimizer norms or full tensors of parameters that are split over ranks.

docs/large_batch.md says what a class declares to receive the argument `logical`, and has an example ("Your own class").
`logical` is a `LogicalTensors`; under a plan it is a `LogicalSlices`. Every rank must call its methods in the same
order. Slices of frozen parameters have no gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SlicePart:
    """Elements [start, stop) of an optimizer's flat slice: part of the parameter `name` of full shape `shape`."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


WholeFunction: TypeAlias = Callable[..., Tensor]
"""Function from the key of an `OwnedTensor` and one or more full tensors of its shape to a tensor of this shape."""

SliceTensors: TypeAlias = Mapping[nn.Parameter, Tensor]
"""A tensor of the shape of each slice of an optimizer, by slice."""

Groups: TypeAlias = Sequence[Mapping[str, Any]]
"""Parameter groups of an optimizer (`optimizer.param_groups`), or some of them."""

OwnedTensor: TypeAlias = tuple[str, nn.Parameter, Mapping[str, Any]]
"""A whole parameter that this rank computes: its name, the key of its state, and its parameter group."""


def key_of(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a key of the optimizer's state of a whole parameter: it has the full shape, but one stored element."""
    return nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(*shape))


NEEDS = ("norms", "matrices", "replicas")
"""Values of `needs` in an optimizer class; all give the same access. With `replicas`, a rank also keeps the errors of
`exchange`'s codec. If `keeps_gradients` is True when a step begins, replicas do not sum their gradients."""


class LogicalTensors:
    """Access of an optimizer to whole parameters. `values`: a tensor for each slice, for example its gradient.

    This class is for one process, where a slice is a parameter itself; `LogicalSlices` is for a plan."""

    every, replicas = 0, 1
    """The most steps between two exchanges of replicas that take local steps (0: none does), and their number."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        self._key_of = {p: key_of(p.shape, dtype=p.dtype, device=p.device) for p in parameters.values()}

    def parts(self, parameter: nn.Parameter) -> Sequence[SlicePart]:
        """Return the parts of a slice in order, each of one parameter; padding belongs to no part."""
        return (SlicePart(self._name_of[parameter], 0, parameter.numel(), tuple(parameter.shape)),)

    def squared_norms(self, values: SliceTensors, *, order: float = 2) -> Mapping[str, Tensor]:
        """Return the squared norm of `values` over each whole parameter, by name: fp64 scalars (a collective).

        order: 2, or math.inf for the largest magnitude."""
        return {self._name_of[p]: torch.linalg.vector_norm(x, ord=order).double() ** 2 for p, x in values.items()}

    def exchange(self, momenta: SliceTensors, *lost: SliceTensors, betas: Mapping[str, float], codec: str) -> None:  # noqa: ARG002
        """Replace momenta by beta · momentum + (1 - beta) · mean gradient of the replicas (collectives).

        | momenta   by slice; equal on all replicas, and they stay equal
        | codec     a value of `wire` that encodes what is sent; its errors are added to the next exchange
        | betas     by name of the parameter
        | lost      after local steps: errors of each replica, and of the owner of each shard times the replicas. Then
        |           momenta are each replica's own, and are replaced by their mean"""
        for parameter, momentum in momenta.items():
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad, 1 - betas[self._name_of[parameter]])

    def owned(self, groups: Groups) -> Sequence[OwnedTensor]:
        """Return the whole parameters of `groups` that `map_whole` computes on this rank."""
        return [(self._name_of[p], self._key_of[p], group) for group in groups for p in group["params"]]

    def map_whole(
        self,
        values: SliceTensors,
        *more: SliceTensors,
        groups: Groups,  # noqa: ARG002 - they say which parameters other ranks have
        function: WholeFunction,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Replace the `values` of each whole parameter of `groups` by `function` of them (collectives).

        | values    a tensor of the shape of each slice of `groups`, by slice; it is overwritten
        | more      further tensors by slice, as further arguments of `function`
        | groups    parameter groups of the optimizer: the same on every rank, even if the rank has no slice of them
        | dtype     dtype in which tensors travel, and which `function` gets; None: the dtype of the slices

        `function` runs on one rank for each parameter, and gets tensors that it may change. Its result must depend
        only on its arguments, and on state that only this rank needs."""
        for parameter, value in values.items():
            full = (each[parameter].to(dtype or value.dtype, copy=True) for each in (values, *more))
            value.copy_(function(self._key_of[parameter], *full))

"""A world in which one rank of any number runs alone, moves nothing and records everything.

The communication cost of a plan follows from its calls, and a single rank knows its own: run the step of one rank here
and read the records. Kinds, axes, bytes and order equal the ones of a job with 8 ranks or 65,536. Meta tensors take no
memory.

    with world.record() as records:
        trainer.step(batch)

On tensors with values every other rank counts as zeros. A sum is this rank's own term, a gather fills only its own
part, and received, broadcast or scattered values are zero. `exchange` returns this rank's value for all of them.
"""
# ruff: noqa: ARG002 — it answers calls without looking at all their arguments

from typing import Any

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import CallRecord, FlightRecorder
from meshwise.comm.api.world import Axes, Group, Work, World


class _Waited(Work):
    """A call that notifies its world when it is waited for."""

    def _finish(self) -> None:
        assert isinstance(self._world, TraceWorld)
        assert self._new_record is not None
        self._world.waited(self._new_record)


class TraceWorld(World):
    """Rank `rank` of `mesh`, alone. Its `device` is where buffers are made: meta by default."""

    def __init__(
        self,
        *,
        rank: int,
        mesh: Mesh,
        device: torch.device | str = "meta",
        flight_recorder: FlightRecorder | None = None,
    ) -> None:
        if not 0 <= rank < mesh.size:
            raise ValueError(f"no rank {rank} in the mesh {mesh}; its ranks are 0 to {mesh.size - 1}")
        super().__init__(rank=rank, mesh=mesh, device=torch.device(device), flight_recorder=flight_recorder)

    def exchange(self, value: Any, *, axes: Axes | None = None) -> list[Any]:
        """Return this rank's value once per rank of the group. Records nothing."""
        return [value] * self.group(self.mesh.names if axes is None else axes).size

    def totals(self, x: Tensor, *, digest: int = 0) -> tuple[list[float], float]:
        """Return the sums as any world does; on meta every sum is 1."""
        if not x.is_meta:
            return super().totals(x)
        self.all_reduce(x.new_empty(x.numel() + 1), axes=self.mesh.names).wait()
        return [1.0] * x.numel(), 0.0

    def waited(self, record: CallRecord) -> None:
        """Note that this rank waits for one of its calls for the first time. Recorders override it."""

    def _broadcast(self, record: CallRecord, group: Group, x: Tensor, source: int) -> Work:
        if group.index != source:
            x.zero_()
        return _Waited(self, record=record)

    def _reduce(self, record: CallRecord, group: Group, x: Tensor, how: tuple[int, str]) -> Work:
        return self._all_reduce(record, group, x, how[1])

    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work:
        _with_zeros(x, op)
        return _Waited(self, record=record)

    def _all_gather(self, record: CallRecord, group: Group, x: Tensor, parts: list[Tensor]) -> Work:
        _only(group.index, x, parts)
        return _Waited(self, record=record)

    def _reduce_scatter(self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        into, op = how
        into.copy_(parts[group.index])
        _with_zeros(into, op)
        return _Waited(self, record=record)

    def _all_to_all(self, record: CallRecord, group: Group, parts: list[Tensor], into: list[Tensor]) -> Work:
        _only(group.index, parts[group.index], into)
        return _Waited(self, record=record)

    def _gather(self, record: CallRecord, group: Group, x: Tensor, how: tuple[list[Tensor] | None, int]) -> Work:
        _only(group.index, x, how[0] or [])
        return _Waited(self, record=record)

    def _scatter(self, record: CallRecord, group: Group, how: tuple[list[Tensor] | None, int], into: Tensor) -> Work:
        if how[0] is None:
            into.zero_()
        else:
            into.copy_(how[0][group.index])
        return _Waited(self, record=record)

    def _send(self, record: CallRecord, group: Group, x: Tensor, to: int) -> Work:
        return _Waited(self, record=record)

    def _recv(self, record: CallRecord, group: Group, x: Tensor, source: int) -> Work:
        x.zero_()
        return _Waited(self, record=record)

    def _barrier(self, record: CallRecord, group: Group) -> None:
        return


def _only(index: int, x: Tensor, parts: list[Tensor]) -> None:
    """Fill `parts` with zeros but for this rank's own; on meta there is nothing to fill, for however many ranks."""
    if x.is_meta:
        return
    for other, part in enumerate(parts):
        if other == index:
            part.copy_(x)
        else:
            part.zero_()


def _with_zeros(x: Tensor, op: str) -> None:
    """Reduce `x` with the zeros of the other ranks."""
    if x.is_meta:
        return
    if op == "max":
        x.copy_(torch.maximum(x, torch.zeros_like(x)))
    elif op == "min":
        x.copy_(torch.minimum(x, torch.zeros_like(x)))

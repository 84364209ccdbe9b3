"""A World in which one rank of any number of ranks runs alone: its collectives are recorded and move no data.

A plan's communication cost follows from the collectives of its ranks. To record the collectives of one rank, run its
step in this world. Kinds, axes, bytes and order equal the real job's, of 8 or 65,536 ranks. Meta tensors are free.

    with world.record() as records:
        trainer.step(batch)

With tensors that have values, all tensors of other ranks count as zeros. A sum is this rank's own term. A gather fills
only this rank's part. Received, broadcast and scattered values are zero. `exchange` repeats this rank's value."""
# ruff: noqa: ARG002 — most methods here do not need all their arguments

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import CallRecord, FlightRecorder
from meshwise.comm.api.world import Axes, Group, Work, World


class TraceWorld(World):
    """World of one rank of `mesh`, with its tensors on `device`. Raises ValueError when the mesh has no such rank."""

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
        """Return a list with this rank's `value` for every rank of the group. No collective is recorded."""
        return [value] * self.group(self.mesh.names if axes is None else axes).size

    def totals(
        self, x: Tensor, *, digest: int = 0, equal: Axes | None = None, axes: Axes | None = None
    ) -> tuple[list[float], float]:
        """Return sums as `World.totals` does; for a meta tensor, 1 for each sum and 0 for the mismatch."""
        if not x.is_meta:
            return super().totals(x, axes=axes)
        self.all_reduce(x.new_empty(x.numel() + 1), axes=self.mesh.names if axes is None else axes).wait()
        return [1.0] * x.numel(), 0.0

    def waited(self, record: CallRecord) -> None:
        """Do nothing; subclasses that record waits override it. Called at the first `wait` of each collective."""

    def _move(self, record: CallRecord, group: Group, give: Mapping[int, Tensor], take: Mapping[int, Tensor]) -> Work:
        for index, x in take.items():
            if x.is_meta and len(take) > 1:  # a rehearsal counts an operation for a message, and none for parts
                break
            if index == group.index:
                x.copy_(give[index])
            else:
                x.zero_()
        return Work(self, record=record, finish=partial(self.waited, record))

    def _reduce(self, record: CallRecord, group: Group, x: Tensor, how: tuple[int, str]) -> Work:
        return self._all_reduce(record, group, x, how[1])

    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work:
        _with_zeros(x, op)
        return Work(self, record=record, finish=partial(self.waited, record))

    def _reduce_scatter(self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        into, op = how
        into.copy_(parts[group.index])
        _with_zeros(into, op)
        return Work(self, record=record, finish=partial(self.waited, record))

    def _barrier(self, record: CallRecord, group: Group) -> None:
        return


def _with_zeros(x: Tensor, op: str) -> None:
    """Reduce `x` in place with zeros for the other ranks; do nothing for meta tensors."""
    if x.is_meta:
        return
    if op == "max":
        x.copy_(torch.maximum(x, torch.zeros_like(x)))
    elif op == "min":
        x.copy_(torch.minimum(x, torch.zeros_like(x)))

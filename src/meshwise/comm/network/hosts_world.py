"""Ranks on several hosts: memory inside each host, messages between them.

What goes between two hosts is slower than what stays in one, so a collective first does inside what can be done there.
With equally many ranks of the group on each host, the ranks of equal place on their hosts form a column:

    |                host 0   host 1
    | place 0          0        2       column 0          all-reduce   reduce-scatter inside, over the places
    | place 1          1        3       column 1                       all-reduce in each column, 1/places of the tensor
    |                                                                  all-gather inside

Reduce-scatter is its first two steps, all-gather the last two, broadcast a column and then inside. Groups on one host
stay inside; everything else goes by messages. A sum is the sum of the hosts' sums, each in the order of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import CallRecord, FlightRecorder
from meshwise.comm.api.ordered_sum import is_narrow
from meshwise.comm.api.world import Axes, Group, Work, World
from meshwise.comm.network.chained_collectives import ChainedCollectives, Steps
from meshwise.comm.network.gloo_world import GlooTransport, GlooWorld
from meshwise.comm.network.mailbox import Mailbox
from meshwise.comm.shared_memory.group_queue import GroupQueues
from meshwise.comm.shared_memory.host_ranks import HostRanks
from meshwise.comm.shared_memory.local_world import LocalWorld


@dataclass(frozen=True)
class _Grid:
    """A group with as many ranks on each of its hosts. `rows`: by host, then by place, indices of the group."""

    group: Group
    rows: Sequence[Sequence[int]]
    host: int
    place: int

    def inside(self, step: int) -> Group:
        """Return the ranks of this host, for the step of that number."""
        return self._part(self.rows[self.host], self.place, step)

    def column(self, step: int) -> Group:
        """Return the ranks of this place."""
        return self._part([row[self.place] for row in self.rows], self.host, step)

    def _part(self, indices: Sequence[int], index: int, step: int) -> Group:
        ranks = tuple(self.group.ranks[at] for at in indices)
        return Group(self.group.axes, ranks, index, f"step {step} among {self.group.ranks}, {self.group.purpose}")


class HostsWorld(World):
    """Ranks of several hosts. `hosts`: by rank, the number of its host."""

    medium = "shared memory and gloo"

    def __init__(
        self, *, inside: LocalWorld, between: GlooWorld, hosts: Sequence[int], chains: ChainedCollectives
    ) -> None:
        super().__init__(rank=between.rank, mesh=between.mesh, device=between.device, journal=between.journal)
        self._inside = inside
        self._between = between
        self._hosts = hosts
        self._chains = chains

    @classmethod
    def joined(cls, room: HostRanks, *, mailbox: Mailbox, mesh: Mesh, hosts: Sequence[int]) -> HostsWorld:
        """Return the world of this rank, which shares memory with the ranks of its host and exchanges messages with the
        others.

        Whatever it waits for, it does its part in everything else that is under way.
        """
        chains = ChainedCollectives()
        lanes = GroupQueues(room, errands=[chains.progress])
        journal = FlightRecorder()
        inside = LocalWorld(rank=room.rank, mesh=mesh, lanes=lanes, journal=journal)
        transport = GlooTransport(mailbox, meanwhile=lanes.progress)
        device = torch.device("cpu")
        between = GlooWorld(rank=room.rank, mesh=mesh, device=device, transport=transport, journal=journal)
        return cls(inside=inside, between=between, hosts=hosts, chains=chains)

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return a tensor in memory that the other ranks of this host can map."""
        return self._inside.empty(numel, dtype=dtype)

    def shared_empty(self, numel: int, *, dtype: torch.dtype, axes: Axes) -> Tensor | None:
        """Return a tensor in one dim that is the same memory for all ranks along `axes`; None unless they are on one
        host.
        """
        here = self._way(self.group(axes)) is self._inside
        return self._inside.over(self.mesh).shared_empty(numel, dtype=dtype, axes=axes) if here else None

    def progress(self) -> None:
        """Do this rank's part in calls that the other ranks have made by now, on this host and between hosts."""
        self._inside.progress()

    def close(self) -> None:
        """Wait until all ranks call it and nothing is under way, then close the connections."""
        self._chains.finish()
        self._between.close()
        self._inside.leave()

    # ---- in steps ----------------------------------------------------------------------------------------------

    def _all_reduce(self, stamp: CallRecord, group: Group, x: Tensor, op: str) -> Work:
        way = self._way(group)
        return way._all_reduce(stamp, group, x, op) if isinstance(way, World) else self._summed(stamp, way, x, op)

    def _reduce(self, stamp: CallRecord, group: Group, x: Tensor, how: tuple[int, str]) -> Work:
        way = self._way(group)
        return way._reduce(stamp, group, x, how) if isinstance(way, World) else self._summed(stamp, way, x, how[1])

    def _summed(self, stamp: CallRecord, grid: _Grid, x: Tensor, op: str) -> Work:
        def steps() -> Steps:
            total = _wide(x, op)
            slices = list(total.tensor_split(len(grid.rows[0])))
            own = slices[grid.place]
            yield self._inside._reduce_scatter(stamp, grid.inside(1), slices, (own, op))
            yield self._between._all_reduce(stamp, grid.column(2), own, op)
            yield self._inside._all_gather(stamp, grid.inside(3), own, slices)
            if total is not x:
                x.copy_(total)

        return self._chain(stamp, grid, steps())

    def _reduce_scatter(self, stamp: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        grid = self._way(group)
        if isinstance(grid, World):
            return grid._reduce_scatter(stamp, group, parts, how)
        into, op = how

        def steps() -> Steps:
            columns = [_wide(torch.cat([parts[at] for at in indices]), op) for indices in zip(*grid.rows, strict=True)]
            own = columns[grid.place]
            yield self._inside._reduce_scatter(stamp, grid.inside(1), columns, (own, op))
            sizes = [parts[row[grid.place]].numel() for row in grid.rows]
            target = torch.empty_like(into, dtype=own.dtype)
            yield self._between._reduce_scatter(stamp, grid.column(2), list(own.split(sizes)), (target, op))
            into.copy_(target)

        return self._chain(stamp, grid, steps())

    def _all_gather(self, stamp: CallRecord, group: Group, x: Tensor, parts: list[Tensor]) -> Work:
        grid = self._way(group)
        if isinstance(grid, World):
            return grid._all_gather(stamp, group, x, parts)

        def steps() -> Steps:
            column = [parts[row[grid.place]] for row in grid.rows]
            yield self._between._all_gather(stamp, grid.column(1), x, column)
            for step, (row, part) in enumerate(zip(grid.rows, column, strict=True), start=2):
                yield self._inside._all_gather(stamp, grid.inside(step), part, [parts[at] for at in row])

        return self._chain(stamp, grid, steps())

    def _broadcast(self, stamp: CallRecord, group: Group, x: Tensor, source: int) -> Work:
        grid = self._way(group)
        if isinstance(grid, World):
            return grid._broadcast(stamp, group, x, source)
        [(host, place)] = [(h, row.index(source)) for h, row in enumerate(grid.rows) if source in row]

        def steps() -> Steps:
            yield self._between._broadcast(stamp, grid.column(1), x, host) if grid.place == place else Work()
            yield self._inside._broadcast(stamp, grid.inside(2), x, place)

        return self._chain(stamp, grid, steps())

    # ---- in one way or the other ---------------------------------------------------------------------------------

    def _all_to_all(self, stamp: CallRecord, group: Group, parts: list[Tensor], into: list[Tensor]) -> Work:
        return self._one(group)._all_to_all(stamp, group, parts, into)

    def _gather(self, stamp: CallRecord, group: Group, x: Tensor, how: tuple[list[Tensor] | None, int]) -> Work:
        return self._one(group)._gather(stamp, group, x, how)

    def _scatter(self, stamp: CallRecord, group: Group, how: tuple[list[Tensor] | None, int], into: Tensor) -> Work:
        return self._one(group)._scatter(stamp, group, how, into)

    def _send(self, stamp: CallRecord, group: Group, x: Tensor, to: int) -> Work:
        return self._to(group.ranks[to])._send(stamp, group, x, to)

    def _recv(self, stamp: CallRecord, group: Group, x: Tensor, source: int) -> Work:
        return self._to(group.ranks[source])._recv(stamp, group, x, source)

    def _barrier(self, stamp: CallRecord, group: Group) -> None:
        self._one(group)._barrier(stamp, group)

    def _to(self, rank: int) -> World:
        return self._inside if self._hosts[rank] == self._hosts[self.rank] else self._between

    def _one(self, group: Group) -> World:
        way = self._way(group)
        return way if isinstance(way, World) else self._between

    def _way(self, group: Group) -> World | _Grid:
        """Return how a collective of this group runs: by one world, or in steps over a grid."""
        rows: dict[int, list[int]] = {}
        for index, rank in enumerate(group.ranks):
            rows.setdefault(self._hosts[rank], []).append(index)
        if len(rows) == 1:
            return self._inside
        own = rows[self._hosts[self.rank]]
        if len(own) == 1 or any(len(row) != len(own) for row in rows.values()):
            return self._between
        host = list(rows).index(self._hosts[self.rank])
        return _Grid(group, list(rows.values()), host, own.index(group.index))

    def _chain(self, stamp: CallRecord, grid: _Grid, steps: Steps) -> Work:
        return self._chains.begin(steps, world=self, stamp=stamp, group=grid.group)


def _wide(x: Tensor, op: str) -> Tensor:
    """`x`, or for a sum of half precision a copy in float32, which is rounded once at the end."""
    return x.float() if op == "sum" and is_narrow(x.dtype) else x

"""Ranks on several hosts: memory inside each host, messages between them.

What goes between two hosts is slower than what stays in one, so a collective first does inside what can be done there.
With as many ranks of the group on each host, those of equal place on their hosts form a column:

                   host 0   host 1
    place 0          0        2       column 0          all-reduce   reduce-scatter inside, over the places
    place 1          1        3       column 1                       all-reduce in each column, 1/places of the tensor
                                                                     all-gather inside

Reduce-scatter is its first two steps, all-gather the last two, broadcast a column and then inside. Groups on one host
stay inside; everything else goes by messages. A sum is the sum of the hosts' sums, each in the order of the group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from meshwise.comm.gloo_world import GlooWorld
from meshwise.comm.journal import Stamp
from meshwise.comm.local_world import LocalWorld
from meshwise.comm.reduction import is_narrow
from meshwise.comm.world import Group, Work, World
from meshwise.mesh import Mesh

Steps: TypeAlias = Iterator[Work]


@dataclass(frozen=True)
class _Grid:
    """A group with as many ranks on each of its hosts. `rows`: by host, then by place, indices of the group."""

    group: Group
    rows: Sequence[Sequence[int]]
    host: int
    place: int

    @property
    def inside(self) -> Group:
        """The ranks of this host."""
        return self._part(self.rows[self.host], self.place)

    @property
    def column(self) -> Group:
        """The ranks of this place."""
        return self._part([row[self.place] for row in self.rows], self.host)

    def _part(self, indices: Sequence[int], index: int) -> Group:
        return Group(self.group.axes, tuple(self.group.ranks[at] for at in indices), index)


class HostsWorld(World):
    """Ranks of several hosts. `hosts`: by rank, the number of its host."""

    def __init__(self, *, inside: LocalWorld, between: GlooWorld, hosts: Sequence[int]) -> None:
        super().__init__(rank=between.rank, mesh=between.mesh, device=between.device, journal=between.journal)
        self._inside = inside
        self._between = between
        self._hosts = hosts
        self._chains: deque[_Chain] = deque()

    def over(self, mesh: Mesh) -> HostsWorld:
        """The same ranks over another mesh of the same size. Raises ValueError when the sizes differ."""
        view = HostsWorld(inside=self._inside.over(mesh), between=self._between.over(mesh), hosts=self._hosts)
        view.check = self.check
        view._chains = self._chains
        return view

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """A tensor in memory that the other ranks of this host can map."""
        return self._inside.empty(numel, dtype=dtype)

    def close(self) -> None:
        """When all ranks have called it: wait for what is under way and close the connections."""
        for chain in list(self._chains):
            chain.wait()
        self._between.close()
        self._inside.leave()

    # ---- in steps ----------------------------------------------------------------------------------------------

    def _all_reduce(self, stamp: Stamp, group: Group, x: Tensor, op: str) -> Work:
        way = self._way(stamp, group)
        return way._all_reduce(stamp, group, x, op) if isinstance(way, World) else self._summed(stamp, way, x, op)

    def _reduce(self, stamp: Stamp, group: Group, x: Tensor, how: tuple[int, str]) -> Work:
        way = self._way(stamp, group)
        return way._reduce(stamp, group, x, how) if isinstance(way, World) else self._summed(stamp, way, x, how[1])

    def _summed(self, stamp: Stamp, grid: _Grid, x: Tensor, op: str) -> Work:
        def steps() -> Steps:
            total = _wide(x, op)
            slices = list(total.tensor_split(len(grid.rows[0])))
            own = slices[grid.place]
            yield self._inside._reduce_scatter(stamp, grid.inside, slices, (own, op))
            yield self._between._all_reduce(stamp, grid.column, own, op)
            yield self._inside._all_gather(stamp, grid.inside, own, slices)
            if total is not x:
                x.copy_(total)

        return self._chain(stamp, steps())

    def _reduce_scatter(self, stamp: Stamp, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        grid = self._way(stamp, group)
        if isinstance(grid, World):
            return grid._reduce_scatter(stamp, group, parts, how)
        into, op = how

        def steps() -> Steps:
            columns = [_wide(torch.cat([parts[at] for at in indices]), op) for indices in zip(*grid.rows, strict=True)]
            own = columns[grid.place]
            yield self._inside._reduce_scatter(stamp, grid.inside, columns, (own, op))
            sizes = [parts[row[grid.place]].numel() for row in grid.rows]
            target = torch.empty_like(into, dtype=own.dtype)
            yield self._between._reduce_scatter(stamp, grid.column, list(own.split(sizes)), (target, op))
            into.copy_(target)

        return self._chain(stamp, steps())

    def _all_gather(self, stamp: Stamp, group: Group, x: Tensor, parts: list[Tensor]) -> Work:
        grid = self._way(stamp, group)
        if isinstance(grid, World):
            return grid._all_gather(stamp, group, x, parts)

        def steps() -> Steps:
            column = [parts[row[grid.place]] for row in grid.rows]
            yield self._between._all_gather(stamp, grid.column, x, column)
            for row, part in zip(grid.rows, column, strict=True):
                yield self._inside._all_gather(stamp, grid.inside, part, [parts[at] for at in row])

        return self._chain(stamp, steps())

    def _broadcast(self, stamp: Stamp, group: Group, x: Tensor, source: int) -> Work:
        grid = self._way(stamp, group)
        if isinstance(grid, World):
            return grid._broadcast(stamp, group, x, source)
        [(host, place)] = [(h, row.index(source)) for h, row in enumerate(grid.rows) if source in row]

        def steps() -> Steps:
            if grid.place == place:
                yield self._between._broadcast(stamp, grid.column, x, host)
            yield self._inside._broadcast(stamp, grid.inside, x, place)

        return self._chain(stamp, steps())

    # ---- in one way or the other ---------------------------------------------------------------------------------

    def _all_to_all(self, stamp: Stamp, group: Group, parts: list[Tensor], into: list[Tensor]) -> Work:
        return self._one(stamp, group)._all_to_all(stamp, group, parts, into)

    def _gather(self, stamp: Stamp, group: Group, x: Tensor, how: tuple[list[Tensor] | None, int]) -> Work:
        return self._one(stamp, group)._gather(stamp, group, x, how)

    def _scatter(self, stamp: Stamp, group: Group, how: tuple[list[Tensor] | None, int], into: Tensor) -> Work:
        return self._one(stamp, group)._scatter(stamp, group, how, into)

    def _send(self, stamp: Stamp, group: Group, x: Tensor, to: int) -> Work:
        return self._to(group.ranks[to])._send(stamp, group, x, to)

    def _recv(self, stamp: Stamp, group: Group, x: Tensor, source: int) -> Work:
        return self._to(group.ranks[source])._recv(stamp, group, x, source)

    def _barrier(self, stamp: Stamp, group: Group) -> None:
        self._one(stamp, group)._barrier(stamp, group)

    def _to(self, rank: int) -> World:
        return self._inside if self._hosts[rank] == self._hosts[self.rank] else self._between

    def _one(self, stamp: Stamp, group: Group) -> World:
        way = self._way(stamp, group)
        return way if isinstance(way, World) else self._between

    def _way(self, stamp: Stamp, group: Group) -> World | _Grid:
        """How a collective of this group goes: by one of the worlds, or in steps over a grid."""
        if self.check:
            self._between.require_agreement(stamp, group=group)
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

    def _chain(self, stamp: Stamp, steps: Steps) -> Work:
        self._chains.append(_Chain(self, stamp, steps, self._chains))
        return self._chains[-1]


class _Chain(Work):
    """Steps, each begun when the one before is complete. Chains go in the order of the calls, whoever is waited for."""

    def __init__(self, world: World, stamp: Stamp, steps: Steps, chains: deque[_Chain]) -> None:
        super().__init__(world, stamp=stamp)
        self._steps = steps
        self._chains = chains
        self._first = next(steps)

    def _finish(self) -> None:
        while self in self._chains:
            self._chains.popleft()._complete()

    def _complete(self) -> None:
        self._first.wait()
        for work in self._steps:
            work.wait()


def _wide(x: Tensor, op: str) -> Tensor:
    """`x`, or for a sum of half precision a copy in float32, which is rounded once at the end."""
    return x.float() if op == "sum" and is_narrow(x.dtype) else x

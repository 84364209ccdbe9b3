"""Compute the place of each parameter in a bucket's flat buffer, and each rank's shard; nothing is allocated.

    | a.weight      | b.weight | pad | b.bias | c.scale | pad |      pieces, sorted by optimizer options
    |<---- run: decay -------------->|<-- run: no decay ----->|      a run: neighbours with the same optimizer options
    |   rank 0    |   rank 1     |   rank 2    |    rank 3    |      shards: equal, so a gather is one collective

A shard may begin inside a piece. Runs and shards begin at multiples of `ALIGNMENT`. So a vectorised kernel computes
only full registers, and gives every element the same bits wherever a run is cut. An elementwise optimizer updates at
most one tensor for each parameter group and bucket."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from meshwise.model.parameter_table import ParameterRow

ALIGNMENT = 16
"""A shard's size is a multiple of this many elements: 64 bytes in fp32, one cache line and one vector register."""

Options: TypeAlias = tuple[tuple[str, Any], ...]
"""Optimizer options of a parameter that differ from the optimizer's defaults: (key, value), sorted by key."""


@dataclass(frozen=True)
class BucketPiece:
    """One parameter in the flat buffer: elements [start, stop). `shape` is the shape of this rank's part."""

    row: ParameterRow
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class BucketPlace:
    """Places of parameters in a flat buffer of `size` elements, divided into `parts` equal shards.

    `runs`: (options, start, stop) of elements whose parameters have the same optimizer options. They cover [0, size);
    the padding is at the end of each run. The first `ranks_without_shard` ranks have no shard."""

    pieces: tuple[BucketPiece, ...]
    runs: tuple[tuple[Options, int, int], ...]
    size: int
    parts: int
    ranks_without_shard: int = 0

    @classmethod
    def of(
        cls, rows: Sequence[ParameterRow], *, shapes: Mapping[str, tuple[int, ...]], parts: int, servers: int = 0
    ) -> "BucketPlace":
        """Return a place in which `rows` lie one after the other, sorted by options.

        shapes: shape of this rank's tensor by parameter name. parts: number of shards, one for each rank.
        servers: if above 0, only the last `servers` ranks have shards."""
        pieces: list[BucketPiece] = []
        starts: dict[Options, int] = {}
        stop = 0
        for row in sorted(rows, key=lambda row: repr(row.options)):
            if row.options not in starts:
                starts[row.options] = stop = -(-stop // ALIGNMENT) * ALIGNMENT
            pieces.append(BucketPiece(row, shapes[row.name], stop, stop + math.prod(shapes[row.name])))
            stop = pieces[-1].stop
        ranks_without_shard = parts - servers if servers else 0
        unit = (parts - ranks_without_shard) * ALIGNMENT
        size = max(1, -(-stop // unit)) * unit
        bounds = itertools.pairwise([*starts.values(), size])
        runs = tuple((options, low, high) for options, (low, high) in zip(starts, bounds, strict=True))
        return cls(tuple(pieces), runs, size, parts - ranks_without_shard, ranks_without_shard)

    @property
    def padding(self) -> list[tuple[int, int]]:
        """The (start, stop) of all elements that belong to no parameter."""
        after = [piece.start for piece in self.pieces[1:]] + [self.size]
        return [(piece.stop, start) for piece, start in zip(self.pieces, after, strict=True) if piece.stop < start]

    def shard(self, index: int) -> tuple[int, int]:
        """Return (start, stop) of the shard of the rank with this index in the group."""
        width, index = self.size // self.parts, index - self.ranks_without_shard
        return (index * width, (index + 1) * width) if index >= 0 else (0, 0)

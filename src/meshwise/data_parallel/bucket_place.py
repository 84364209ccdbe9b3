"""Place the parameters of a unit in one flat buffer, and choose the slice that each rank owns. Arithmetic only.

    | a.weight      | b.weight | pad | b.bias | c.scale | pad |      pieces, sorted by optimizer options
    |<---- run: decay -------------->|<-- run: no decay ----->|      a run: neighbours with the same optimizer options
    |   rank 0    |   rank 1     |   rank 2    |    rank 3    |      shards: equal, so a gather is one collective

A shard cuts pieces wherever it falls. Runs begin aligned, like shards. So a kernel that takes several elements at a
time has whole registers to the end, and gives every element the same bits wherever a run is cut. Sorting by options
makes a rank's elements with the same learning rate and weight decay one contiguous slice. So an elementwise optimizer
sees at most one tensor for each group and unit.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.model.parameter_table import ParameterRow

ALIGNMENT = 16
"""Shards are a multiple of this many elements: 64 bytes in fp32, one cache line and one vector register."""

Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class BucketPiece:
    """Elements of one parameter on this rank: [start, stop) of the flat buffer, of this shape."""

    row: ParameterRow
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class OptionRun:
    """A contiguous slice whose elements share optimizer options."""

    options: Options
    start: int
    stop: int

    def within(self, start: int, *, stop: int) -> "OptionRun | None":
        """Return the part of the run inside [start, stop), or None."""
        low, high = max(self.start, start), min(self.stop, stop)
        return OptionRun(self.options, low, high) if low < high else None


@dataclass(frozen=True)
class BucketPlace:
    """Pieces in order, runs that cover [0, size) with padding at the end of each, and equal shards."""

    pieces: tuple[BucketPiece, ...]
    runs: tuple[OptionRun, ...]
    size: int
    parts: int

    @classmethod
    def of(cls, rows: Sequence[ParameterRow], *, shapes: Mapping[str, tuple[int, ...]], parts: int) -> "BucketPlace":
        """Lay `rows`, of these shapes by name, one after the other, padded to `parts` equal aligned shards."""
        pieces: list[BucketPiece] = []
        starts: dict[Options, int] = {}
        stop = 0
        for row in sorted(rows, key=lambda row: repr(row.options)):
            if row.options not in starts:
                starts[row.options] = stop = -(-stop // ALIGNMENT) * ALIGNMENT
            pieces.append(BucketPiece(row, shapes[row.name], stop, stop + math.prod(shapes[row.name])))
            stop = pieces[-1].stop
        unit = parts * ALIGNMENT
        size = max(1, -(-stop // unit)) * unit
        bounds = itertools.pairwise([*starts.values(), size])
        runs = tuple(OptionRun(options, low, high) for options, (low, high) in zip(starts, bounds, strict=True))
        return cls(tuple(pieces), runs, size, parts)

    @property
    def padding(self) -> list[tuple[int, int]]:
        """The slices that belong to no parameter."""
        after = [piece.start for piece in self.pieces[1:]] + [self.size]
        return [(piece.stop, start) for piece, start in zip(self.pieces, after, strict=True) if piece.stop < start]

    def chunks(self, owned: tuple[int, int], *, most: int | None) -> Iterator[list[OptionRun]]:
        """Yield the owned elements in parts of at most `most` elements, each as its runs."""
        start, stop = owned
        for low in range(start, stop, most or stop - start):
            high = min(stop, low + most) if most else stop
            yield [part for run in self.runs if (part := run.within(low, stop=high))]

    def shard(self, index: int) -> tuple[int, int]:
        """[start, stop) of the part that `index` owns."""
        width = self.size // self.parts
        return index * width, (index + 1) * width

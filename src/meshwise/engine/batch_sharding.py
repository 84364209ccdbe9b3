"""The rows of a batch that one rank runs, cut into micro-batches.

A rank may have no rows: the last batch of an epoch is short, or rows do not divide. Where the model's own collectives
run inside the forward (ZeRO-3), such a rank must still call them, so it runs a spare row that counts nothing.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.base import tensor_tree as tree
from meshwise.base.mesh import even_split
from meshwise.comm.api.world import World
from meshwise.model.random_draws import SampleRows


@dataclass(frozen=True)
class MicroBatch:
    """Rows to run (None: nothing to run), whether their loss counts, and their sample numbers."""

    rows: Any
    counts: bool
    samples: SampleRows

    def skipped(self) -> "MicroBatch":
        """Return the micro-batch without rows that takes its place."""
        return dataclasses.replace(self, rows=None, counts=False)


@dataclass(frozen=True)
class BatchShards:
    """Shards of a global batch: the rows [start, stop) of each rank that has its own, and this rank's place among
    them.
    """

    shares: Sequence[tuple[int, int]]
    index: int

    @classmethod
    def of(cls, size: int, *, ranks: int, index: int) -> "BatchShards":
        """Return even shards of `size` rows."""
        return cls(even_split(size, ranks), index)

    def cuts(self, parts: int) -> list[tuple[int, int]]:
        """Return the rows [start, stop) of this rank's micro-batches, the first ones a row larger if need be."""
        start, stop = self.shares[self.index]
        return [(start + low, start + high) for low, high in even_split(stop - start, parts)]

    def samples(self, number: int, *, parts: int) -> SampleRows:
        """Return the sample numbers of micro-batch `number` of `parts`; a spare row counts as one."""
        start, stop = self.cuts(parts)[number]
        return SampleRows(start, max(1, stop - start), further=functools.partial(self._further, number, parts))

    def _further(self, number: int, parts: int, shares: int) -> SampleRows:
        there = dataclasses.replace(self, index=(self.index + shares) % len(self.shares))
        return there.samples(number, parts=parts)


@dataclass(frozen=True)
class BatchSharder:
    """Cutter of batches: rows split over the ranks along `axes`. `lockstep`: every micro-batch has to be run."""

    world: World
    axes: tuple[str, ...]
    lockstep: bool

    @property
    def ranks(self) -> int:
        """Number of ranks with rows of their own."""
        return self.world.group(self.axes).size

    def shards(self, size: int) -> BatchShards:
        """Return the even shards of a global batch of `size` rows."""
        return BatchShards.of(size, ranks=self.ranks, index=self.world.group(self.axes).index)

    def cut(self, batch: Any, *, local: bool, total: int | None, parts: int) -> list[MicroBatch]:
        """Return this rank's `parts` micro-batches of a batch. `local`: `batch` is its own part of `total` rows (None:
        all have as many). Raises ValueError when it is not.
        """
        rows = tree.row_count(batch)
        if not local:
            return micro_batches(batch, shards=self.shards(rows), parts=parts, lockstep=self.lockstep)
        shards = self.shards(rows * self.ranks if total is None else total)
        start, stop = shards.shares[shards.index]
        if stop - start != rows:
            raise ValueError(f"this rank's part has {rows} rows; of {total} in total, share() gives it {stop - start}")
        spare = spare_row(batch, world=self.world) if self.lockstep and (total or 0) < self.ranks else None
        return micro_batches(batch, shards=shards, parts=parts, lockstep=self.lockstep, offset=start, spare=spare)


def spare_row(batch: Any, *, world: World) -> Any:
    """Return one row of a rank that has rows, for ranks without; None if all have rows, or none has.

    Every rank calls it.
    """
    rows = world.exchange(tree.row_count(batch))
    if min(rows) or not max(rows):
        return None
    found = world.exchange(tree.take_rows(batch, start=0, stop=1) if tree.row_count(batch) else None)
    return next(row for row in found if row is not None)


def micro_batches(
    batch: Any, *, shards: BatchShards, parts: int, lockstep: bool, offset: int = 0, spare: Any = None
) -> list[MicroBatch]:
    """Cut this rank's rows of the global batch into exactly `parts` micro-batches.

    `batch` holds the rows of the global batch from number `offset` on, this rank's among them.
    `lockstep`: every micro-batch has to be run. A micro-batch without rows gets the batch's first row; without one, the
    `spare` row; if no rank has any, the empty batch.
    """
    if not lockstep:
        spare = None
    elif tree.row_count(batch):
        spare = tree.take_rows(batch, start=0, stop=1)
    elif spare is None:
        spare = batch
    samples = [shards.samples(number, parts=parts) for number in range(parts)]
    return [
        MicroBatch(tree.take_rows(batch, start=start - offset, stop=stop - offset), counts=True, samples=own)
        if start < stop
        else MicroBatch(spare, counts=False, samples=own)
        for (start, stop), own in zip(shards.cuts(parts), samples, strict=True)
    ]

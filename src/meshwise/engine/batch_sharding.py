"""Split a global batch into the rows of each rank, and a rank's rows into micro-batches.

A rank may have no rows, because the last batch of an epoch is short. Where the forward contains collectives (ZeRO-3),
this rank must still call them. So it runs a spare row, a copy of another row, whose loss is multiplied by 0.

`gather_rows` gathers the rows of all ranks, with gradients, for losses that compare the samples of a batch."""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.base import tensor_tree as tree
from meshwise.base.mesh import even_split
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.model.random_draws import SampleRows


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a rank."""

    rows: Any
    """Tree of tensors whose dim 0 counts the rows; None: this micro-batch is not run."""
    counts: bool
    """True if the loss of these rows counts; False for a spare row, and where there are no rows."""
    samples: SampleRows
    """Numbers of the rows in the global batch, from which dropout is drawn."""

    def skipped(self) -> "MicroBatch":
        """Return this micro-batch without rows, so that it is not run."""
        return dataclasses.replace(self, rows=None, counts=False)


@dataclass(frozen=True)
class BatchShards:
    """Rows of a global batch by rank."""

    shares: Sequence[tuple[int, int]]
    """Rows [start, stop) of each rank along the axes that split the batch, in order."""
    index: int
    """Index of this rank in `shares`."""

    def row_ranges(self, count: int) -> list[tuple[int, int]]:
        """Return the rows [start, stop) of each micro-batch of this rank; the first ones may have one row more."""
        start, stop = self.shares[self.index]
        return [(start + low, start + high) for low, high in even_split(stop - start, count)]

    def samples(self, number: int, *, count: int) -> SampleRows:
        """Return the sample numbers of micro-batch `number`; without rows, it is the number of the spare row."""
        start, stop = self.row_ranges(count)[number]
        return SampleRows(start, max(1, stop - start), further=functools.partial(self._further, number, count))

    def _further(self, number: int, count: int, shares: int) -> SampleRows:
        there = dataclasses.replace(self, index=(self.index + shares) % len(self.shares))
        return there.samples(number, count=count)


@dataclass(frozen=True)
class BatchSharder:
    """Splitter of global batches over ranks and micro-batches."""

    world: World
    axes: tuple[str, ...]
    """Axes of the mesh whose ranks have different rows."""
    runs_empty: bool
    """True if a rank also runs the micro-batches for which it has no rows, on a spare row."""

    @property
    def ranks(self) -> int:
        """Number of ranks along `axes`: a batch is split into so many shards."""
        return self.world.group(self.axes).size

    def shards(self, size: int) -> BatchShards:
        """Return the even shards of a global batch of `size` rows."""
        return BatchShards(even_split(size, self.ranks), self.world.group(self.axes).index)

    def split(self, batch: Any, *, local: bool, total: int | None, count: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of the global batch or, with `local`, of its own rows. Every rank calls it.

        `total`, used with `local`: rows of the global batch; None: every rank has as many rows as this one. Raises
        ValueError when a local batch does not have the number of rows that an even split of `total` gives this rank."""
        rows = tree.row_count(batch)
        if not local:
            return micro_batches(batch, shards=self.shards(rows), count=count, runs_empty=self.runs_empty)
        shards = self.shards(rows * self.ranks if total is None else total)
        start, stop = shards.shares[shards.index]
        if stop - start != rows:
            raise ValueError(f"this rank's batch has {rows} rows; of {total} in total, share() gives it {stop - start}")
        spare = spare_row(batch, world=self.world) if self.runs_empty and (total or 0) < self.ranks else None
        return micro_batches(batch, shards=shards, count=count, runs_empty=self.runs_empty, offset=start, spare=spare)


def spare_row(batch: Any, *, world: World) -> Any:
    """Return one row of a rank with rows, for ranks without; None if all or none have rows. Every rank calls it."""
    rows = world.exchange(tree.row_count(batch))
    if min(rows) or not max(rows):
        return None
    found = world.exchange(tree.take_rows(batch, start=0, stop=1) if tree.row_count(batch) else None)
    return next(row for row in found if row is not None)


def micro_batches(
    batch: Any, *, shards: BatchShards, count: int, runs_empty: bool, offset: int = 0, spare: Any = None
) -> list[MicroBatch]:
    """Return this rank's rows as exactly `count` micro-batches; `batch` starts at row `offset` of the global batch.

    Without `runs_empty`, a micro-batch without rows has `rows=None` and is not run. With it, the micro-batch gets the
    first row of `batch`, else `spare`, else the empty batch."""
    if not runs_empty:
        spare = None
    elif tree.row_count(batch):
        spare = tree.take_rows(batch, start=0, stop=1)
    elif spare is None:
        spare = batch
    samples = [shards.samples(number, count=count) for number in range(count)]
    return [
        MicroBatch(tree.take_rows(batch, start=start - offset, stop=stop - offset), counts=True, samples=own)
        if start < stop
        else MicroBatch(spare, counts=False, samples=own)
        for (start, stop), own in zip(shards.row_ranges(count), samples, strict=True)
    ]


def gather_rows(x: Tensor, *, world: World, axes: tuple[str, ...], counts: bool) -> tuple[Tensor, int]:
    """Return the rows of `x` of all ranks, in the order of the global batch, and the index of this rank's first row.

    Each rank compares its own rows with all of them. So the backward sums the gradients of all ranks, and returns this
    rank's part. Every rank along `axes` calls it.

    | x        (rows, …); the numbers of rows may differ, the other dims are equal
    | axes     mesh axes whose ranks have different rows
    | counts   False: the rows of this rank are spare ones; no rank gets them, and the returned index is 0"""
    group = world.group(axes)
    own = x if counts else x[:0]
    if group.size == 1:
        return own, 0
    sizes = torch.zeros(group.size, dtype=torch.int64, device=world.device)
    sizes[group.index] = len(own)
    world.all_reduce(sizes, axes=axes).wait()
    rows = sizes.tolist()
    start = sum(rows[: group.index]) if counts else 0
    return gradient.all_gather(own, world=world, axes=axes, sizes=rows).wait(), start

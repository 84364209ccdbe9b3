"""The rows of a batch that one rank runs, cut into micro-batches.

A rank may have no rows: the last batch of an epoch is short, or rows do not divide. Where the model's own collectives
run inside the forward (ZeRO-3), such a rank must still call them, so it runs a spare row that counts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwise import tree
from meshwise.layout.geometry import even_split
from meshwise.model.draws import Rows


@dataclass(frozen=True)
class MicroBatch:
    """Rows to run (None: nothing to run), whether what comes out of them counts, and which samples they are."""

    rows: Any
    counts: bool
    samples: Rows


def micro_batches(
    batch: Any, *, share: tuple[int, int], parts: int, lockstep: bool, first: int = 0
) -> list[MicroBatch]:
    """Cut the rows [start, stop) of `batch` into exactly `parts` micro-batches, the first ones a row larger if need be.

    `first`: which sample of the global batch the first row of `batch` is.
    `lockstep`: every micro-batch has to be run. One without rows is then the batch's first row, or, when the whole
    batch is empty, the empty batch itself.
    """
    start, stop = share
    spare = None
    if lockstep:
        spare = tree.take_rows(batch, start=0, stop=1) if tree.rows(batch) else batch
    cuts = [(start + low, start + high) for low, high in even_split(stop - start, parts)]
    return [
        MicroBatch(
            tree.take_rows(batch, start=low, stop=high),
            counts=True,
            samples=Rows(first + low, high - low, share=stop - start),
        )
        if low < high
        else MicroBatch(spare, counts=False, samples=Rows(first, 1))
        for low, high in cuts
    ]

"""When parameters are updated: after the whole step is known to be sound, or as gradients arrive.

                       forward │ backward of c │ of b          │ of a          │ norm │
    StepAfterBackward                                                             │ update a, b, c │
    StepInBackward             │ count         │ reduce, update c │ reduce, update b │ reduce, update a │

What an update needs beside the gradient of its unit is the count that the gradient is divided by. The count is known
when every rank has run its last forward. One more all-reduce of one number then lets units be updated during the
backward. On the CPU or a disk, where the update has its own thread and memory, it then takes no extra time. What cannot
be known by then is the norm, so nothing is clipped; and when the norm turns out not to be finite, other units are
updated.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwise.comm.api.world import Work, World
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.engine_protocol import Engine
from meshwise.memory.chunked_update import ChunkedUpdate, UpdateChunk


class UpdateTiming(Protocol):
    """Decides when the parameters are updated."""

    def begin(self) -> None:
        """Begin a step. Raises TierError when an earlier update failed half way."""

    def counted(self, count: Tensor) -> None:
        """Take the loss count of this rank after the last forward of a step; every rank calls it.

        `count`: a scalar on the device, zero on a rank whose rows another rank counts.
        """

    def apply(self, factor: float) -> None:
        """Update by the gradients times `factor`, and publish the result to the other ranks."""

    def leave_out(self) -> bool:
        """Leave the update of an unsound step out; return whether a rank had applied a part of it already."""


class StepAfterBackward:
    """Updates after the backward, when loss and norm are known."""

    def __init__(self, engine: Engine, *, update: ChunkedUpdate) -> None:
        self._engine = engine
        self._update = update

    def begin(self) -> None:
        """Check that the last update was whole. Raises TierError when one failed half way."""
        self._update.check()

    def counted(self, count: Tensor) -> None:
        """Do nothing: the count arrives again with the norm."""

    def apply(self, factor: float) -> None:
        """Update everything; an updated bucket travels to the other ranks while the next is updated."""
        self._engine.scale_gradients(factor)
        works: list[Work] = []
        last = {bucket.chunks[-1]: bucket for bucket in self._engine.buckets}

        def done(chunk: UpdateChunk) -> None:
            if chunk in last:
                works.append(last[chunk].publish())

        self._update.step(done)
        for work in works:
            work.wait()

    def leave_out(self) -> bool:
        """Return False: nothing was updated."""
        return False


class StepInBackward:
    """Updates each bucket on a thread as soon as its gradient is reduced."""

    def __init__(self, buckets: Sequence[Bucket], *, update: ChunkedUpdate, world: World) -> None:
        self._buckets = buckets
        self._update = update
        self._world = world
        self._count: Tensor | None = None
        self._counting = Work()
        self._left: dict[Bucket, None] = {}
        self._spoilt = False
        for bucket in buckets:
            bucket.on_reduced = self._reduced

    def begin(self) -> None:
        """Forget the count of a step that ended half way."""
        self._count = None
        self._update.check()
        if self._spoilt:
            self._spoilt = False
            for bucket in self._buckets:
                bucket.clear_padding()

    def counted(self, count: Tensor) -> None:
        """Start the all-reduce of the count: gradients that arrive from now on are final."""
        self._count = count.to(torch.float64, copy=True)
        self._counting = self._world.all_reduce(self._count, axes=self._world.mesh.names)
        self._left = dict.fromkeys(self._buckets)
        self._update.begin()

    def apply(self, factor: float) -> None:  # noqa: ARG002 - it is known since `counted`
        """Wait for the last updates, and publish all of them to the other ranks."""
        for bucket in list(self._left):
            self._reduced(bucket)
        self._count = None
        self._update.finish()
        for work in [bucket.publish() for bucket in self._buckets]:
            work.wait()

    def leave_out(self) -> bool:
        """Abandon the updates under way; return whether a rank had updated a part.

        Ranks own different parts of a gradient, and those that own finite parts may have updated them.
        """
        self._count = None
        broken = any(self._world.exchange(self._update.abandon()))
        if broken:
            self._update.mark_broken()
        return broken

    def _reduced(self, bucket: Bucket) -> None:
        """Start the update of a bucket whose gradient has been reduced."""
        count = self._count
        if count is None:
            return
        del self._left[bucket]
        self._counting.wait()
        bucket.square()  # before it is multiplied
        there = bucket.shard_group.tiers.mark()

        def ready() -> None:
            there()
            total = float(count)
            factor = 1 / total if total > 0 else math.nan
            self._spoilt |= math.isnan(factor)
            for gradient in bucket.scaled(factor):
                gradient.mul_(factor)

        self._update.arrived(bucket.chunks, ready=ready)


def updating(engine: Engine, *, optimizer: torch.optim.Optimizer, early: bool) -> tuple[ChunkedUpdate, UpdateTiming]:
    """Return the update of an engine and its timing; `early`: as gradients arrive, where the CPU updates."""
    early = early and engine.tiers.offload.updates_on_cpu and engine.world.device.type != "meta"
    chunks = [bucket.chunks for bucket in engine.buckets]
    update = ChunkedUpdate(optimizer, chunks=chunks, tiers=engine.tiers, early=early)
    if early:
        return update, StepInBackward(engine.buckets, update=update, world=engine.world)
    return update, StepAfterBackward(engine, update=update)

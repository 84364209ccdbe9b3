"""Choose when parameters are updated: after the whole backward, or during it, bucket by bucket.

                       forward │ backward of c │ of b          │ of a          │ norm │
    StepAfterBackward                                                             │ update a, b, c │
    StepInBackward             │ count         │ reduce, update c │ reduce, update b │ reduce, update a │

An update divides the summed gradient by the loss count. The count is known when every rank has run its last forward.
So one more all-reduce, of one number, lets units be updated during the backward. If the CPU updates, on a separate
thread, the update overlaps with the backward. The gradient norm is known only after the backward. So early updates
cannot clip, and when the norm turns out not to be finite, some units may be updated already."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from meshwise.comm.api.world import Work, World
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.staged_engine import Engine
from meshwise.memory.chunked_update import ChunkedUpdate, UpdateChunk


class StepAfterBackward:
    """Updates all parameters after the backward, when loss and norm are known.

    A step calls the same four methods of both classes; every rank calls `receive_count` after the last forward."""

    def __init__(self, engine: Engine, *, update: ChunkedUpdate) -> None:
        self._engine = engine
        self._update = update

    def begin(self) -> None:
        """Ask the optimizer which gradients it needs. Raises TierError if an earlier update failed half way."""
        self._update.check()
        local = bool(getattr(self._update.optimizer, "keeps_gradients", False))
        for bucket in self._engine.buckets:
            bucket.local = local
            if not local:
                bucket.reduction_state.pop("momentum", None)  # this step changes the owned part alone

    def receive_count(self, count: Tensor) -> None:
        """Do nothing: the count of this rank enters the `factor` of `apply`."""

    def apply(self, factor: float) -> None:
        """Update all buckets; each is published as soon as it is updated, while the next is updated."""
        self._engine.scale_gradients(factor)
        works = [bucket.publish() for bucket in self._engine.buckets if not bucket.chunks]  # a worker of servers
        last = {bucket.chunks[-1]: bucket for bucket in self._engine.buckets if bucket.chunks}

        def done(chunk: UpdateChunk) -> None:
            if chunk in last:
                works.append(last[chunk].publish())

        self._update.step(done)
        for work in works:
            work.wait()

    def skip_update(self) -> bool:
        """Return False: no parameter was updated."""
        return False


class StepInBackward:
    """Updates each bucket on a separate thread as soon as its gradient is reduced. Sets `on_reduced` of the buckets."""

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
        """Discard the count of a step that raised. Raises TierError if an earlier update failed half way."""
        self._count = None
        self._update.check()
        if self._spoilt:
            self._spoilt = False
            for bucket in self._buckets:
                bucket.clear_padding()

    def receive_count(self, count: Tensor) -> None:
        """Start the all-reduce of the count; buckets that are reduced from now on are updated at once.

        count: number of samples or tokens in the loss, a scalar on the device; 0 if another rank counts the same rows.
        """
        self._count = count.to(torch.float64, copy=True)
        self._counting = self._world.all_reduce(self._count, axes=self._world.mesh.names)
        self._left = dict.fromkeys(self._buckets)
        self._update.begin()

    def apply(self, factor: float) -> None:  # noqa: ARG002 - 1 / count is applied already
        """Start the missing updates, wait for all of them, and publish the parameters to the other ranks."""
        for bucket in list(self._left):
            self._reduced(bucket)
        self._count = None
        self._update.finish()
        for work in [bucket.publish() for bucket in self._buckets]:
            work.wait()

    def skip_update(self) -> bool:
        """Cancel the updates that have not run; return True if an update has run on some rank (a collective).

        The ranks own different parts of the gradient, and updates of finite parts may have run."""
        self._count = None
        broken = any(self._world.exchange(self._update.abandon()))
        if broken:
            self._update.broken = True  # other ranks have updated
        return broken

    def _reduced(self, bucket: Bucket) -> None:
        """Start the update of a bucket whose gradient has been reduced."""
        count = self._count
        if count is None:
            return
        del self._left[bucket]
        self._counting.wait()
        bucket.squared_norm()  # before it is multiplied
        there = bucket.storage.tiers.mark()

        def ready() -> None:
            there()
            total = float(count)
            factor = 1 / total if total > 0 else math.nan
            self._spoilt |= math.isnan(factor)
            for gradient in bucket.gradients_to_scale(factor):
                gradient.mul_(factor)

        self._update.submit(bucket.chunks, ready=ready)


UpdateTiming: TypeAlias = StepAfterBackward | StepInBackward
"""Decides when the parameters are updated in a step."""


def build_update(
    engine: Engine, *, optimizer: torch.optim.Optimizer, early: bool
) -> tuple[ChunkedUpdate, UpdateTiming]:
    """Return the `ChunkedUpdate` of an engine and its timing; `early`: in the backward, if its state is offloaded."""
    early = early and engine.tiers.offload.updates_on_cpu and engine.world.device.type != "meta"
    chunks = [bucket.chunks for bucket in engine.buckets]
    update = ChunkedUpdate(optimizer, chunks=chunks, tiers=engine.tiers, early=early)
    if early:
        return update, StepInBackward(engine.buckets, update=update, world=engine.world)
    return update, StepAfterBackward(engine, update=update)

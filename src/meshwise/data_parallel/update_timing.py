"""Update parameters after the backward, when the loss, its count and the gradient norm of the step are known.

The update runs bucket by bucket. Each bucket is sent to the other ranks as soon as it is updated."""

from meshwise.data_parallel.staged_engine import Engine
from meshwise.memory.chunked_update import ChunkedUpdate, UpdateChunk


class StepAfterBackward:
    """Updates all parameters after the backward, when loss and norm are known."""

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

"""One stage on this rank, in the form that the interpreter needs.

Stages that share a parameter with other stages are reduced at the end of the step, when the gradients of the shared
parameter have been summed. The others are reduced as the schedule says.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.data_parallel.batch_norm_statistics import BatchStatistics
from meshwise.data_parallel.data_parallel_engine import DataParallel
from meshwise.engine.batch_sharding import MicroBatch
from meshwise.engine.microbatch_runner import Seen
from meshwise.model.parameter_table import ParameterRow
from meshwise.model.random_draws import RandomDraws
from meshwise.pipeline.run.stage import Stage


@dataclass(frozen=True)
class LiveStage:
    """Stage of this rank: its engine, its draws and its module."""

    stage: Stage
    engine: DataParallel
    draws: RandomDraws
    statistics: BatchStatistics


class StageParameters:
    """Keeps the parameters of one stage for the interpreter."""

    def __init__(self, live: LiveStage, *, tied: frozenset[str]) -> None:
        self._engine, self._draws, self._statistics = live.engine, live.draws, live.statistics
        self._late = any(row.name in tied for row in live.engine.table.rows)
        self._parts: Sequence[MicroBatch] = ()
        self._seen: Seen | None = None
        self._index = 0
        self._waits = False

    def begin(self, parts: Sequence[MicroBatch], *, seen: Seen | None = None) -> None:
        """Begin a step; with `seen`, its gradients are only recorded."""
        self._parts, self._seen, self._waits = parts, seen, False
        if seen is None:
            self._engine.begin_step()
        self._engine.accumulate(None if seen is None else self._show)

    def begin_forwards(self, parts: Sequence[MicroBatch]) -> None:
        """Begin an evaluation of these micro-batches, or a prediction if there are none."""
        self._parts = parts

    def running(self, index: int, *, again: bool) -> contextlib.AbstractContextManager[None]:
        """Inside, the stage runs micro-batch `index`: forward, or (`again`) backward."""
        self._index = index
        if not torch.is_grad_enabled():
            return self._draws.running(self._parts[index].samples) if self._parts else contextlib.nullcontext()
        return self._inside(self._parts[index], again=again)

    @contextlib.contextmanager
    def _inside(self, part: MicroBatch, *, again: bool) -> Iterator[None]:
        with (
            self._draws.running(part.samples, again=again),
            self._statistics.running(counts=part.counts, again=again)
            if self._statistics.active
            else contextlib.nullcontext(),
        ):
            yield

    def gather(self) -> None:
        """Start to make the parameters whole."""
        self._engine.gather()

    def ready(self) -> None:
        """Return when they are."""
        for unit in self._engine.units:
            unit.ready()

    def free(self) -> None:
        """Put them to rest."""
        for unit in self._engine.units:
            unit.free()

    def reduce(self) -> None:
        """Reduce what the stage has accumulated, or note that it is to be done."""
        self._waits = self._late
        if self._seen is None and not self._late:
            self._engine.reduce()

    def settle(self) -> None:
        """End the step: everything is reduced."""
        if self._waits:
            self._engine.reduce()
        self._engine.settle()

    def _show(self, row: ParameterRow, gradient: Tensor) -> None:
        assert self._seen is not None
        self._seen(self._index, row, gradient)

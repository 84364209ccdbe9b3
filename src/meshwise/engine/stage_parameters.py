"""Gather, free and reduce the parameters of one pipeline stage on this rank, when the schedule's interpreter asks.

Gradients are reduced at the REDUCE of the schedule. If the stage shares a parameter with another stage, its gradients
are reduced at the end of the step, after the summation of the shared parameter's gradients."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.data_parallel.batch_norm_statistics import BatchStatistics
from meshwise.data_parallel.data_parallel_engine import DataParallel
from meshwise.engine.batch_sharding import MicroBatch
from meshwise.engine.microbatch_runner import OnGradient, prepared
from meshwise.model.parameter_table import ParameterRow
from meshwise.model.random_draws import RandomDraws
from meshwise.pipeline.run.pipeline_stage import Stage


@dataclass(frozen=True)
class LiveStage:
    """A stage of this rank, the storage of its parameters, its random draws, and the statistics of its batch norms."""

    stage: Stage
    engine: DataParallel
    draws: RandomDraws
    statistics: BatchStatistics


class StageParameters:
    """Parameters of one stage, as the schedule's interpreter uses them: a `StageStorage`."""

    def __init__(self, live: LiveStage, *, tied: frozenset[str]) -> None:
        """`tied`: names of the model's parameters that several stages hold."""
        self._engine, self._draws, self._statistics = live.engine, live.draws, live.statistics
        self._late = any(row.name in tied for row in live.engine.table.rows)
        self._micro_batches: Sequence[MicroBatch] = ()
        self._on_gradient: OnGradient | None = None
        self._index = 0
        self._waits = False

    def begin(self, micro_batches: Sequence[MicroBatch], *, on_gradient: OnGradient | None = None) -> None:
        """Begin a step of these micro-batches. With `on_gradient`, pass gradients to it, and keep or reduce none."""
        self._micro_batches, self._on_gradient, self._waits = micro_batches, on_gradient, False
        if on_gradient is None:
            self._engine.begin_step()
        self._engine.accumulate(None if on_gradient is None else self._show)

    def begin_forwards(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Begin forwards without backwards: an evaluation of these micro-batches, or a prediction if there are none."""
        self._micro_batches = micro_batches

    def running(self, index: int, *, again: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context for running micro-batch `index`: its forward, or with `again` its backward."""
        self._index = index
        if not torch.is_grad_enabled():
            return (
                self._draws.running(self._micro_batches[index].samples)
                if self._micro_batches
                else contextlib.nullcontext()
            )
        return self._inside(self._micro_batches[index], again=again)

    @contextlib.contextmanager
    def _inside(self, micro_batch: MicroBatch, *, again: bool) -> Iterator[None]:
        with prepared(micro_batch, draws=self._draws, statistics=self._statistics, again=again):
            yield
        if again:
            self._engine.collect()

    def gather(self) -> None:
        """Start to gather the parameters."""
        self._engine.gather()

    def ready(self) -> None:
        """Wait until the parameters are gathered."""
        for unit in self._engine.units:
            unit.ready()

    def free(self) -> None:
        """Free the gathered parameters; the shards stay."""
        for unit in self._engine.units:
            unit.free()

    def reduce(self) -> None:
        """Reduce the accumulated gradients over the ranks; if the stage has a shared parameter, `settle` does so."""
        self._waits = self._late
        if self._on_gradient is None and not self._late:
            self._engine.reduce()

    def settle(self) -> None:
        """End the step: reduce the gradients of a stage with a shared parameter, and wait for all reductions."""
        if self._waits:
            self._engine.reduce()
        self._engine.settle()

    def _show(self, row: ParameterRow, gradient: Tensor) -> None:
        assert self._on_gradient is not None
        self._on_gradient(self._index, row, gradient)

"""Run the micro-batches of a rank: forward and backward of all of them, or forward alone.

The trainer's work around it (exchange of totals, norm, update) is the same for a whole model and for stages. This file
is where the two differ. Here is the whole model.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from meshwise.base import tensor_tree as tree
from meshwise.comm.api.world import World
from meshwise.data_parallel.batch_norm_statistics import BatchStatistics
from meshwise.data_parallel.data_parallel_engine import DataParallel, discard_gradient
from meshwise.engine.batch_sharding import MicroBatch
from meshwise.model.forward import Forward, Loss, call_loss
from meshwise.model.parameter_table import ParameterRow
from meshwise.model.random_draws import RandomDraws
from meshwise.pipeline.cut.model_cut import ModelCut
from meshwise.pipeline.schedules.action import Action, ActionKind, Schedule

Sums: TypeAlias = tuple[Tensor, Tensor]
"""The sum of a loss and its count: two fp64 scalars on the device."""

Counted: TypeAlias = Callable[[Tensor], None]
"""Callback that receives this rank's count after its last forward."""

Seen: TypeAlias = Callable[[int, ParameterRow, Tensor], None]
"""Callback that receives the gradient of one parameter: `(micro_batch, row, gradient)`."""


@dataclass(frozen=True)
class MicrobatchTask:
    """Computation for a micro-batch: the output and its loss."""

    forward: Forward
    loss: Loss


class MicrobatchRunner(Protocol):
    """Runner of this rank's micro-batches."""

    lockstep: bool
    """Whether every micro-batch has to be run, one without rows too: other ranks wait for what it calls."""
    schedule: Schedule
    """What each rank along `pp` does in a step, in order."""
    cut: ModelCut | None
    """The model's stages, where it has some."""
    evaluated_in: int
    """How many micro-batches the rows of an evaluation are cut into."""

    def begin(self, step: int) -> None:
        """Begin step number `step`, which must differ from all others."""

    def finish(self) -> None:
        """Finish the step after its forwards and backwards."""

    def train(self, parts: Sequence[MicroBatch], *, scale: float, counted: Counted) -> Sums:
        """Run forward, backward of the loss times `scale`, and reduction; return this rank's loss and count."""

    def evaluate(self, parts: Sequence[MicroBatch]) -> Sums:
        """Run the forward of every micro-batch; return this rank's loss and count."""

    def inspect(self, parts: Sequence[MicroBatch], *, seen: Seen) -> None:
        """Run forward and backward again, and pass every gradient to `seen`."""

    def predict(self, batch: Any) -> Any:
        """Return the output for a batch."""

    def close(self) -> None:
        """Take the hooks off the model."""


class WholeModelRunner:
    """Runner for a rank that holds the whole model."""

    cut: ModelCut | None = None
    evaluated_in = 1

    def __init__(
        self,
        engine: DataParallel,
        *,
        task: MicrobatchTask,
        draws: RandomDraws,
        statistics: BatchStatistics,
        schedule: Schedule,
        shares_rows: bool,
    ) -> None:
        """`schedule` has one row, of one stage. `shares_rows`: ranks split the rows of one matmul."""
        self.schedule = schedule
        self._engine = engine
        self._task = task
        self._draws = draws
        self._statistics = statistics
        self._shares_rows = shares_rows
        self.lockstep = shares_rows or statistics.joined or any(unit.is_sharded for unit in engine.units)
        self.begin, self.finish, self.close = draws.begin, draws.finish, draws.close

    def train(self, parts: Sequence[MicroBatch], *, scale: float, counted: Counted) -> Sums:
        """Run forward, backward of the loss times `scale`, and reduction; return this rank's loss and count."""
        total, tokens = zeros(self._engine.world)
        self._engine.begin_step()
        flight_recorder = self._engine.world.flight_recorder
        for index, part in enumerate(parts):
            last = index + 1 == len(parts)
            flight_recorder.doing = Action(0, ActionKind.F, index)
            if part.rows is None:
                if last:
                    counted(tokens)
                self._engine.backward(None, last=last)
                continue
            with self._running(part):
                loss, count = self._run(part.rows)
            if part.counts:
                total += loss.detach().double()
                tokens += count
            if last:
                counted(tokens)
            # Where the ranks share out the rows of one product, what a spare row gives would reach the others, and what
            # the others' rows give reaches this rank.
            keep = part.counts or self._shares_rows
            flight_recorder.doing = Action(0, ActionKind.B, index)
            with self._running(part, again=True):
                self._engine.backward(scaled(loss, by=scale if part.counts else 0.0), last=last, keep=keep)
        return total, tokens

    def evaluate(self, parts: Sequence[MicroBatch]) -> Sums:
        """Run the forward of every micro-batch; return this rank's loss and count."""
        total, tokens = zeros(self._engine.world)
        for part in parts:
            if part.rows is not None:
                with self._running(part):
                    loss, count = self._run(part.rows)
                if part.counts:
                    total += loss.double()
                    tokens += count
        return total, tokens

    def inspect(self, parts: Sequence[MicroBatch], *, seen: Seen) -> None:
        """Run forward and backward again, and pass every gradient to `seen`."""
        for number, part in enumerate(parts):
            if part.rows is not None:
                with self._running(part):
                    loss, _ = self._run(part.rows)
                show = functools.partial(seen, number) if part.counts or self._shares_rows else discard_gradient
                if loss.requires_grad:
                    with self._running(part, again=True):
                        self._engine.inspect(loss if part.counts else loss * 0, on_gradient=show)
        self._engine.gatherer.free_all()

    def predict(self, batch: Any) -> Any:
        """Return the output for a batch."""
        with self._engine.gatherer.guard:
            output = self._task.forward(self._engine.module, self._begin_forward(batch))
        self._engine.gatherer.free_all()
        return output

    @contextlib.contextmanager
    def _running(self, part: MicroBatch, *, again: bool = False) -> Iterator[None]:
        """Inside, the model runs a micro-batch: forward, or (`again`) backward."""
        with (
            self._draws.running(part.samples, again=again),
            self._statistics.running(counts=part.counts, again=again)
            if self._statistics.active
            else contextlib.nullcontext(),
        ):
            yield

    def _run(self, rows: Any) -> Sums:
        """Run forward and loss of one micro-batch; return (sum, count), scalars on the device."""
        with self._engine.gatherer.guard:
            rows = self._begin_forward(rows)
            return call_loss(self._engine.module, rows, forward=self._task.forward, loss=self._task.loss)

    def _begin_forward(self, rows: Any) -> Any:
        """Begin a forward of the model; return the rows on the device."""
        self._engine.gatherer.begin_pass(backward=False)
        return placed(rows, world=self._engine.world)


def scaled(loss: Tensor, *, by: float) -> Tensor:
    """Return the loss to go backward from."""
    return loss if by == 1.0 else loss * by


def placed(rows: Any, *, world: World) -> Any:
    """Return a tree of tensors on the device."""
    return tree.map_tensors(lambda tensor: tensor.to(world.device, non_blocking=True), rows)


def zeros(world: World) -> Sums:
    """Return the sums of a batch without rows."""
    loss, count = torch.zeros(2, dtype=torch.float64, device=world.device).unbind()
    return loss, count

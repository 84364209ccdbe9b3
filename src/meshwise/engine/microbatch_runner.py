"""Run the micro-batches of a rank that holds the whole model: forward and backward of each, or forward alone.

`BatchSharder` splits a global batch into the rows of each rank, and a rank's rows into micro-batches. A rank may have
no rows, because the last batch of an epoch is short. Where the forward contains collectives (ZeRO-3), this rank must
still call them. So it runs a spare row, a copy of another row, whose loss is multiplied by 0."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base import tensor_tree as tree
from meshwise.base.mesh import even_split, weighted_split
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.data_parallel.batch_norm_statistics import BatchStatistics
from meshwise.data_parallel.data_parallel_engine import DataParallel, discard_gradient
from meshwise.model.forward import Forward, Loss, call_loss
from meshwise.model.parameter_table import ParameterRow
from meshwise.model.random_draws import RandomDraws, SampleRows
from meshwise.pipeline.cut.model_cut import ModelCut
from meshwise.pipeline.schedules.schedule_table import Action, ActionKind, Schedule
from meshwise.tensor.core.vocab_parallel import SplitLogits


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a rank."""

    rows: Any
    """Tree of tensors whose dim 0 counts the rows; None: this micro-batch is not run."""
    counts: bool
    """True if the loss of these rows counts; False for a spare row, and where there are no rows."""
    samples: SampleRows
    """Numbers of the rows in the global batch, from which dropout is drawn."""


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
        """Return the sample numbers of micro-batch `number` of `count`: of its rows, or else of its spare row."""
        start, stop = self.row_ranges(count)[number]

        def further(shares: int) -> SampleRows:
            there = dataclasses.replace(self, index=(self.index + shares) % len(self.shares))
            return there.samples(number, count=count)

        return SampleRows(start, max(1, stop - start), further=further)


@dataclass(frozen=True)
class BatchSharder:
    """Splitter of global batches over ranks and micro-batches."""

    world: World
    axes: tuple[str, ...]
    """Axes of the mesh whose ranks have different rows."""
    runs_empty: bool
    """True if a rank also runs the micro-batches for which it has no rows, on a spare row."""
    servers: int = 0
    """Number of ranks at the end of the group that have no rows, whatever batch they are given."""
    weights: tuple[int, ...] | None = None
    """Relative sizes of the ranks' shards of a batch; None: even shards."""

    @property
    def ranks(self) -> int:
        """Number of ranks along `axes` that have rows, and so of the shards of a batch."""
        return self.world.group(self.axes).size - self.servers

    def shards(self, size: int) -> BatchShards:
        """Return the shards of a global batch of `size` rows."""
        split = even_split(size, self.ranks) if self.weights is None else weighted_split(size, weights=self.weights)
        return BatchShards([*split, *[(size, size)] * self.servers], self.world.group(self.axes).index)

    def split(self, batch: Any, *, local: bool, total: int | None, count: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of the global batch or, with `local`, of its own rows. Every rank calls it.

        With `runs_empty`, a micro-batch without rows gets the first row of `batch`, else a row of another rank, else
        the empty batch. Without `runs_empty`, its `rows` are None, and it is not run.

        `total`, used with `local`: rows of the global batch; None: every rank has as many rows as this one. Raises
        ValueError when a local batch does not have the number of rows that a split of `total` gives this rank."""
        rows, offset, spare = tree.row_count(batch), 0, batch
        by = dataclasses.replace(self, weights=None) if local and total is None else self
        shards = by.shards(rows if not local else rows * self.ranks if total is None else total)
        if local and shards.index < self.ranks:
            offset, end = shards.shares[shards.index]
            if end - offset != rows:
                raise ValueError(f"this rank's batch has {rows} rows; of {total}, share() gives it {end - offset}")
            if self.runs_empty and (total or 0) < self.ranks:
                spare = spare_row(batch, world=self.world)
        if rows:
            spare = tree.take_rows(batch, start=0, stop=1)
        samples = [shards.samples(number, count=count) for number in range(count)]
        return [
            MicroBatch(tree.take_rows(batch, start=start - offset, stop=stop - offset), counts=True, samples=own)
            if start < stop
            else MicroBatch(spare if self.runs_empty else None, counts=False, samples=own)
            for (start, stop), own in zip(shards.row_ranges(count), samples, strict=True)
        ]


def spare_row(batch: Any, *, world: World) -> Any:
    """Return one row of a rank with rows, for ranks without; `batch` if all or none have rows. Every rank calls it."""
    rows = world.exchange(tree.row_count(batch))
    if min(rows) or not max(rows):
        return batch
    found = world.exchange(tree.take_rows(batch, start=0, stop=1) if tree.row_count(batch) else None)
    return next(row for row in found if row is not None)


def gather_rows(x: Tensor, *, world: World, axes: tuple[str, ...], counts: bool) -> tuple[Tensor, int]:
    """Return the rows of `x` of all ranks, in the order of the global batch, and the index of this rank's first row.

    Each rank compares its rows with the rows of all ranks. So the backward sums the gradients of all ranks, and returns
    this rank's part. Every rank along `axes` calls it.

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


Sums: TypeAlias = tuple[Tensor, Tensor]
"""(sum of the loss, its count) over this rank's rows: two fp64 scalars on the device."""

OnGradient: TypeAlias = Callable[[int, ParameterRow, Tensor], None]
"""Callback that receives one parameter's gradient: `(number of the micro-batch, the parameter's row, gradient)`."""


@dataclass(frozen=True)
class MicrobatchTask:
    """Functions that run for each micro-batch.

    | forward   `forward(model, batch)` returns the model's output
    | loss      `loss(output, batch)` returns (sum, count)
    | call      `call(model, (args, given))` calls the model on these arguments, in the plan's compute dtype"""

    forward: Forward
    loss: Loss
    call: Forward


@dataclass(eq=False)
class LiveModel:
    """The model of a rank, or one of its stages: its parameters, random draws and statistics of batch norms."""

    engine: DataParallel
    draws: RandomDraws
    statistics: BatchStatistics

    @contextlib.contextmanager
    def prepared(self, micro_batch: MicroBatch, *, again: bool) -> Iterator[None]:
        """Prepare draws and batch statistics for a micro-batch's forward (with `again`: backward) inside the block."""
        norms: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.statistics.active:
            norms = self.statistics.running(counts=micro_batch.counts)
        with self.draws.running(micro_batch.samples, again=again), norms:
            yield


class WholeModelRunner:
    """Runner for a rank that holds the whole model: runs micro-batch after micro-batch.

    | runs_empty   True if a micro-batch without rows is run too, on a spare row, as other ranks wait in its collectives
    | schedule     actions of each rank along `pp` in a step, in order
    | cut          division of the model into pipeline stages; None without pp
    | lines        (source, target) of all messages between stages, as indices along `pp`; empty without pp
    | evaluation_micro_batches   number of micro-batches into which each batch of an evaluation is split
    | counts       False while a spare row runs, whose loss does not count; see `MicroBatch`
    | begin        `begin(step)` begins step number `step`, on which random draws depend; `finish()` ends it
    | close        `close()` removes the hooks of the random draws from the model"""

    cut: ModelCut | None = None
    lines: AbstractSet[tuple[int, int]] = frozenset()
    evaluation_micro_batches = 1

    def __init__(
        self, live: LiveModel, *, task: MicrobatchTask, schedule: Schedule, shares_rows: bool, overlaps: bool = False
    ) -> None:
        """`schedule`: one row of actions, for one stage. `shares_rows`: several ranks split the rows of one matmul.

        `overlaps`: the forward of the next micro-batch runs beside the backward of this one."""
        self.schedule = schedule
        self.counts = True
        self.task = self._task = task
        self.engine = self._engine = live.engine
        self._live = live
        self._shares_rows, self._overlaps = shares_rows, overlaps
        self._repeats_nothing = False  # a backward has shown that it repeats no part of the forward
        self.runs_empty = shares_rows or live.statistics.joined or any(unit.is_sharded for unit in live.engine.units)
        self.begin, self.finish, self.close = live.draws.begin, live.draws.finish, live.draws.close

    def train(self, micro_batches: Sequence[MicroBatch], *, scale: float) -> Sums:
        """Run forward, backward of the loss times `scale`, and reduction; return the unscaled loss and count."""
        sums, world = zeros(self._engine.world), self._engine.world
        beside: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self._engine.begin_step()
        self._repeats_nothing &= not (self._overlaps and _checkpoints(self._engine.module))
        for index, micro_batch in enumerate(micro_batches):
            last = index + 1 == len(micro_batches)
            with beside:
                world.flight_recorder.doing = Action(0, ActionKind.F, index)
                loss = self._add_forward(micro_batch, sums)
            if loss is None:
                beside = contextlib.nullcontext()
                self._engine.backward(None, last=last)
                continue
            backward = functools.partial(self._train_backward, index, micro_batch, loss, scale=scale, last=last)
            if self._overlaps and self._repeats_nothing and not last:
                beside = world.side_by_side.running(backward, turn=world.turn, streams=world.streams)
            else:
                beside = contextlib.nullcontext()
                backward()
        return sums

    def _add_forward(self, micro_batch: MicroBatch, sums: Sums) -> Tensor | None:
        """Return the loss of a micro-batch, after adding it and its count to `sums`; None without rows."""
        if micro_batch.rows is None:
            return None
        with self._running(micro_batch):
            loss, count = self._run(micro_batch.rows)
        if micro_batch.counts:
            sums[0].add_(loss.detach().double())
            sums[1].add_(count)
        return loss

    def _train_backward(self, index: int, micro_batch: MicroBatch, loss: Tensor, *, scale: float, last: bool) -> None:
        """Run the backward of a micro-batch's loss times `scale`."""
        self._engine.world.flight_recorder.doing = Action(0, ActionKind.B, index)
        # If ranks split the rows of one matmul, a backward carries gradients from one rank's rows to another rank.
        # So the gradients of a spare row, whose loss is multiplied by 0, must be kept: other ranks' are among them.
        keep, by = micro_batch.counts or self._shares_rows, scale if micro_batch.counts else 0.0
        with contextlib.ExitStack() as state:
            # Beside a forward, draws and split tokens have the state of that forward.
            if not (self._overlaps and self._repeats_nothing):
                state.enter_context(self._running(micro_batch, again=True))
            if self._overlaps and not self._repeats_nothing:
                state.enter_context(_no_repeated_forward(self._engine.module))
            self._engine.backward(scaled(loss, by=by), last=last, keep=keep)
        self._repeats_nothing = True

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Sums:
        """Run the forward of every micro-batch, and return the loss and count of this rank's rows."""
        sums = zeros(self._engine.world)
        for micro_batch in micro_batches:
            self._add_forward(micro_batch, sums)
        return sums

    def inspect(self, micro_batches: Sequence[MicroBatch], *, on_gradient: OnGradient) -> None:
        """Run forward and backward again, and pass each gradient to `on_gradient`; no gradient is kept or reduced."""
        for number, each in enumerate(micro_batches):
            if each.rows is not None:
                with self._running(each):
                    loss, _ = self._run(each.rows)
                show = functools.partial(on_gradient, number) if each.counts or self._shares_rows else discard_gradient
                if loss.requires_grad:
                    with self._running(each, again=True):
                        self._engine.inspect(loss if each.counts else loss * 0, on_gradient=show)
        self._engine.gatherer.free_all()

    def predict(self, batch: Any) -> Any:
        """Return the output of the model for `batch`; afterwards free the gathered parameters."""
        with self._engine.gatherer.gather_on_use:
            output = whole_output(self._task.forward(self._engine.module, self._begin_forward(batch)))
        self._engine.gatherer.free_all()
        return output

    # ---- for an open step ---------------------------------------------------------------------------------------

    def forward(self, call: Callable[[nn.Module], Any], *, rows: MicroBatch, first: bool) -> Any:
        """Return `call(model)` for the samples `rows`. `first`: False if a pending backward may need gathered units."""
        self._engine.gatherer.begin_forward(keep=not first)
        with self._running(rows), self._engine.gatherer.gather_on_use:
            return call(self._engine.module)

    def backward(self, loss: Tensor, *, rows: MicroBatch, last: bool) -> None:
        """Run the backward of `loss`, and add its gradients to the gradients of this step."""
        with self._running(rows, again=True):
            self._engine.backward(loss, last=last)

    @contextlib.contextmanager
    def backward_of_another(self) -> Iterator[None]:
        """Let another trainer's backward run through this model inside the block; discard this model's gradients."""
        engine = self._engine
        engine.accumulate(discard_gradient)
        try:
            with engine.gatherer.backward():
                yield
        finally:
            engine.gatherer.free_all()
            engine.collect()  # those of units that the backward used in part
            engine.settle()

    def _running(self, micro_batch: MicroBatch, *, again: bool = False) -> contextlib.AbstractContextManager[None]:
        """Prepare a micro-batch's forward (with `again`: backward) inside the block; see `LiveModel.prepared`."""
        self.counts = micro_batch.counts
        return self._live.prepared(micro_batch, again=again)

    def _run(self, rows: Any) -> Sums:
        """Run forward and loss of one micro-batch, and return (sum, count) of the loss, scalars on the device."""
        with self._engine.gatherer.gather_on_use:
            rows = self._begin_forward(rows)
            return call_loss(self._engine.module, rows, forward=self._task.forward, loss=self._task.loss)

    def _begin_forward(self, rows: Any) -> Any:
        self._engine.gatherer.begin_forward()
        return placed(rows, world=self._engine.world)


def _checkpoints(model: nn.Module) -> bool:
    """Return whether a module has a flag such as `gradient_checkpointing`, which a script may set between two steps."""
    flags = (item for module in model.modules() for item in vars(module).items())
    return any(value is True and "checkpointing" in name for name, value in flags)


@contextlib.contextmanager
def _no_repeated_forward(model: nn.Module) -> Iterator[None]:
    """Refuse, in a backward inside the block, calls of the model's modules: they would repeat parts of the forward."""

    def refuse(module: nn.Module, _arguments: Any) -> None:
        raise RuntimeError(
            f"the backward repeats the forward of a {type(module).__name__}, and would mix it with the forward of the "
            "next micro-batch. Write overlap_microbatches=0, or let the model not checkpoint its activations (of "
            "transformers: model.gradient_checkpointing_disable())"
        )

    with contextlib.ExitStack() as undo:
        for module in model.modules():
            undo.callback(module.register_forward_pre_hook(refuse).remove)
        yield


def whole_output(output: Any) -> Any:
    """Return an output whose split logits are gathered, so that one rank alone may read it (a collective under tp)."""
    return tree.map_tensors(lambda x: x.whole() if isinstance(x, SplitLogits) else x, output)


def scaled(loss: Tensor, *, by: float) -> Tensor:
    """Return `by * loss`, from which the backward starts; the loss itself for a factor of 1."""
    return loss if by == 1.0 else loss * by


def placed(rows: Any, *, world: World) -> Any:
    """Return the tree `rows` with its tensors on this rank's device; copies from pinned memory are asynchronous."""
    return tree.map_tensors(lambda tensor: tensor.to(world.device, non_blocking=True), rows)


def zeros(world: World) -> Sums:
    """Return a loss sum and a count of 0: two fp64 scalars on this rank's device."""
    loss, count = torch.zeros(2, dtype=torch.float64, device=world.device).unbind()
    return loss, count

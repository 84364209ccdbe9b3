"""Run the micro-batches of a rank that holds pipeline stages, in the order of a schedule (`StagedRunner`).

If stages share a parameter, its gradients must be summed over these stages first. So the gradients of such stages are
reduced at the end of the step, not at the REDUCE of the schedule."""

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.api.flight_recorder import StepPhase
from meshwise.data_parallel.stage_engines import Engine
from meshwise.engine.microbatch_runner import (
    LiveModel,
    MicroBatch,
    MicrobatchTask,
    OnGradient,
    Sums,
    WholeModelRunner,
    scaled,
    whole_output,
    zeros,
)
from meshwise.model.forward import call_loss
from meshwise.pipeline.cut.model_cut import ModelCut
from meshwise.pipeline.run.schedule_interpreter import MicrobatchJob, ScheduleInterpreter, pack, tensor_specs, unpack
from meshwise.pipeline.run.stage_forward import Stage, signature
from meshwise.pipeline.schedules.schedule_table import Action, ActionKind, Schedule, add_gathers, add_transfers, lower
from meshwise.plan import PlanError


@dataclass(eq=False)
class LiveStage(LiveModel):
    """A pipeline stage of this rank. It is a `StageStorage`, whose methods the schedule's interpreter calls."""

    stage: Stage
    tied: bool = False
    """True if another stage holds a parameter of this stage too."""
    _on_gradient: OnGradient | None = None
    _waits: bool = False

    def begin(self, *, on_gradient: OnGradient | None = None) -> None:
        """Begin a step. With `on_gradient`, pass gradients to it, and neither keep nor reduce them."""
        self._on_gradient, self._waits = on_gradient, False
        if on_gradient is None:
            self.engine.begin_step()

    @contextlib.contextmanager
    def running(self, index: int, *, batch: MicroBatch | None, again: bool) -> Iterator[None]:
        """Prepare micro-batch `index`'s forward (with `again`: backward) inside the block. `predict` has no `batch`."""
        if batch is None:
            yield
            return
        if again:
            show = None if self._on_gradient is None else functools.partial(self._on_gradient, index)
            self.engine.accumulate(show)
        with self.prepared(batch, again=again):
            yield
        if again:
            self.engine.collect()

    def gather(self) -> None:
        """Start to gather the parameters."""
        self.engine.gather()

    def ready(self) -> None:
        """Wait until the parameters are gathered."""
        for unit in self.engine.units:
            unit.ready()

    def free(self) -> None:
        """Free the gathered parameters; the shards stay."""
        for unit in self.engine.units:
            unit.free()

    def reduce(self) -> None:
        """Reduce the accumulated gradients over the ranks; for a stage with a shared parameter, `settle` does it."""
        self._waits = self.tied
        if self._on_gradient is None and not self.tied:
            self.engine.reduce()

    def settle(self) -> None:
        """End the step: reduce the gradients of a stage with a shared parameter, and wait for all reductions."""
        if self._waits:
            self.engine.reduce()
        self.engine.settle()


class StagedRunner:
    """Runner for a rank that holds pipeline stages. It has the attributes and methods of `WholeModelRunner`."""

    def __init__(
        self,
        engine: Engine,
        *,
        stages: Mapping[int, LiveStage],
        task: MicrobatchTask,
        schedule: Schedule,
        cut: ModelCut,
        shares_rows: bool,
    ) -> None:
        """`schedule`: computations only. `shares_rows`: ranks split the rows of one matmul, so `runs_empty` is True."""
        self.runs_empty = shares_rows or any(live.statistics.joined for live in stages.values())
        self.cut = cut
        self.counts = True
        self._engine, self._stages, self._task = engine, stages, task
        self._world = engine.world
        self._gathers = any(stage.engine.reduction.shards_parameters for stage in stages.values())
        self.schedule, self._plain = lower(schedule, gathers=self._gathers), schedule
        self.lines = engine.lines | self.schedule.message_pairs
        self.evaluation_micro_batches = schedule.microbatches
        for live in stages.values():
            live.tied = any(row.name in engine.tied for row in live.engine.table.rows)
        runs = {index: live.stage for index, live in stages.items()}
        self._runtime = ScheduleInterpreter(runs, storages=stages, world=self._world)

    @cached_property
    def _forwards(self) -> Schedule:
        """Schedule of forwards alone: each rank runs a micro-batch in all its stages, then the next one."""
        ranks = []
        for own in map(self._plain.stages_of, range(self._plain.ranks)):
            places = itertools.product(range(self._plain.microbatches), own)
            ranks.append(tuple(Action(stage, ActionKind.F, index) for index, stage in places))
        forwards = add_transfers(Schedule(tuple(ranks)))
        return add_gathers(forwards) if self._gathers else forwards

    def begin(self, step: int) -> None:
        """Begin step number `step`, on which random draws depend."""
        for live in self._stages.values():
            live.draws.begin(step)

    def finish(self) -> None:
        """Finish the step after its forwards and backwards."""
        for live in self._stages.values():
            live.draws.finish()

    def close(self) -> None:
        """Remove the hooks of the random draws from the model."""
        for live in self._stages.values():
            live.draws.close()

    def train(self, micro_batches: Sequence[MicroBatch], *, scale: float) -> Sums:
        """Train on the micro-batches, as in `WholeModelRunner.train`; loss and count are 0 except on the last stage."""
        sums = zeros(self._world)
        for live in self._stages.values():
            live.begin()
        self._runtime.run(self.schedule, jobs=self._jobs(micro_batches, sums, scale))
        self._world.flight_recorder.doing = StepPhase.SETTLE
        self._engine.sum_ties()
        for live in self._stages.values():
            live.settle()
        return sums

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Sums:
        """Run all forwards; return loss and count of this rank's rows, which are 0 except on the last stage."""
        sums = zeros(self._world)
        self._runtime.run(self._forwards, jobs=self._jobs(micro_batches, sums))
        return sums

    def inspect(self, micro_batches: Sequence[MicroBatch], *, on_gradient: OnGradient) -> None:
        """Run forward and backward again, and pass each gradient to `on_gradient`; no gradient is kept or reduced."""
        for live in self._stages.values():
            live.begin(on_gradient=on_gradient)
        self._runtime.run(self.schedule, jobs=self._jobs(micro_batches, zeros(self._world)))

    def predict(self, batch: Any) -> Any:
        """Return the last stage's output, on every rank. Raises PlanError if a tensor of the output is all NaN."""
        job = MicrobatchJob(lambda model: self._task.forward(model, self._given(batch)), (signature(batch), False))
        returned = self._runtime.run(self._forwards, jobs={0: job})
        skeleton, parts = pack({"output": whole_output(returned[0])}) if returned else (None, ())
        if names := "".join(self._world.exchange(_absent(returned[0]) if returned else "", axes="pp")):
            raise PlanError(
                f"predict would return NaN in {names}: an earlier stage computes it, and does not send it because the "
                "loss does not use it. Let the model not return it (of transformers: "
                "output_hidden_states=False, output_attentions=False), or let the loss use it; or load a checkpoint "
                "under a plan without pp, and predict there"
            )
        skeletons = self._world.exchange(skeleton, axes="pp")
        source = next(index for index, one in enumerate(skeletons) if one is not None)
        specs = tensor_specs(skeletons[source])
        arrived = [torch.empty(one.shape, dtype=one.dtype, device=self._world.device) for one in specs]
        if skeleton is not None:
            arrived = [tensor.contiguous() for tensor in parts]
        for tensor in arrived:
            self._world.broadcast(tensor, axes="pp", source=source).wait()
        return unpack(skeletons[source], arrived=arrived)["output"]

    def _jobs(self, micro_batches: Sequence[MicroBatch], sums: Sums, scale: float = 1.0) -> dict[int, MicrobatchJob]:
        grads = torch.is_grad_enabled()
        return {
            index: MicrobatchJob(functools.partial(self._run, one, sums, scale), (signature(one.rows), grads), one)
            for index, one in enumerate(micro_batches)
            if one.rows is not None
        }

    def _given(self, batch: Any) -> Any:
        """Return a copy of the batch on the device, because the model may change its batch in place."""
        return map_tensors(lambda x: x.to(self._world.device, non_blocking=True, copy=True), batch)

    def _run(self, micro_batch: MicroBatch, sums: Sums, scale: float, model: nn.Module) -> Tensor:
        """Run this stage's forward of a micro-batch. The last stage adds loss and count to `sums`; returns the loss."""
        self.counts = micro_batch.counts
        rows, task = self._given(micro_batch.rows), self._task
        loss, count = call_loss(model, rows, forward=task.forward, loss=task.loss)
        if not micro_batch.counts:
            return scaled(loss, by=0.0)
        sums[0].add_(loss.detach().double())
        sums[1].add_(count)
        return scaled(loss, by=scale)


def _absent(output: Any) -> str:
    """Return as text the entries of an output in which a tensor is all NaN; "" if there is no such entry."""
    entries: Iterable[tuple[Any, Any]] = [("its output", output)]
    if isinstance(output, Mapping):
        entries = output.items()
    elif isinstance(output, list | tuple):
        entries = enumerate(output)
    return ", ".join(
        str(name)
        for name, value in entries
        if any(x.is_floating_point() and x.numel() and bool(x.isnan().all()) for x in tensors(value))
    )


MicrobatchRunner: TypeAlias = WholeModelRunner | StagedRunner

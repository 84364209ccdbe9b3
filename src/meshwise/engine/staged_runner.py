"""Run the micro-batches of a rank that holds pipeline stages, in the order of a schedule (`StagedRunner`).

The engines of a rank's stages are combined into one `StagedEngine` for the trainer. Its table lists the parameters of
all stages, its norm covers all of this rank's stages. A tied parameter is one that several stages hold. Its gradients
are summed on the first of these stages, which sends the sum back, so every copy gets the same update. In tables and
norms only the first copy counts.

The parameters of a stage are gathered and freed when the schedule's interpreter asks. Gradients are reduced at the
REDUCE of the schedule. If the stage shares a parameter with another stage, its gradients are reduced at the end of the
step, after the summation of the shared parameter's gradients."""

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.api.flight_recorder import StepPhase
from meshwise.comm.api.world import World
from meshwise.data_parallel.batch_norm_statistics import BatchStatistics
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_place import Options
from meshwise.data_parallel.data_parallel_engine import DataParallel, from_holders
from meshwise.data_parallel.live_unit import LiveUnit
from meshwise.engine.microbatch_runner import (
    MicroBatch,
    MicrobatchTask,
    OnCount,
    OnGradient,
    Sums,
    placed,
    prepared,
    scaled,
    whole_output,
    zeros,
)
from meshwise.model.forward import call_loss
from meshwise.model.parameter_table import ParameterRow, ParameterTable
from meshwise.model.random_draws import RandomDraws
from meshwise.pipeline.cut.model_cut import ModelCut
from meshwise.pipeline.run.pipeline_stage import Stage, signature
from meshwise.pipeline.run.schedule_interpreter import MicrobatchJob, ScheduleInterpreter, pack, tensor_specs, unpack
from meshwise.pipeline.schedules.schedule_table import (
    Action,
    ActionKind,
    Schedule,
    add_gathers,
    add_transfers,
    lines_of,
    lower,
)
from meshwise.plan import PlanError


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


class StagedEngine:
    """Engine of a rank that holds pipeline stages: passes each call to the engines of its stages."""

    def __init__(self, stages: Mapping[int, DataParallel], *, ranks: Sequence[int], world: World) -> None:
        """Exchange the tables of all stages (collective). `stages`: engines of this rank's stages by stage index.

        `ranks`: for each stage of the model, the index along `pp` of the rank that holds it."""
        self.world = world
        self.tiers = next(iter(stages.values())).tiers
        self._stages = stages
        self._ranks = ranks
        own = {index: (engine.table, _buffers(engine.module)) for index, engine in stages.items()}
        of_all = {index: stage for ranks in world.exchange(own, axes="pp") for index, stage in ranks.items()}
        # A rehearsal leaves out stages that equal another one.
        self._tables = {index: of_all[index][0] for index in sorted(of_all)}
        first: dict[str, tuple[int, Tensor]] = {}
        for index in self._tables:
            for name, like in of_all[index][1].items():
                first.setdefault(name, (index, like))
        self._buffers = first
        units = [
            dataclasses.replace(unit, rows=tuple(row for row in unit.rows if not row.counted_elsewhere))
            for table in self._tables.values()
            for unit in table.units
        ]
        self.table = ParameterTable(tuple(unit for unit in units if unit.rows))

    @property
    def tied(self) -> frozenset[str]:
        """Names of the parameters that several stages hold."""
        return frozenset(row.name for table in self._tables.values() for row in table.rows if row.counted_elsewhere)

    @property
    def lines(self) -> frozenset[tuple[int, int]]:
        """(source, target) of the messages between the copies of tied parameters, as indices along `pp`."""
        ends = [(self._ranks[stages[0]], self._ranks[index]) for stages in self._tied().values() for index in stages]
        return frozenset((a, b) for first, other in ends for a, b in ((first, other), (other, first)) if a != b)

    @property
    def module(self) -> nn.Module:
        """Module of this rank's stage; a ModuleList if the rank has several stages."""
        return self.modules[0] if len(self._stages) == 1 else nn.ModuleList(self.modules)

    @property
    def modules(self) -> list[nn.Module]:
        """Modules of this rank's stages, in the order of the stages."""
        return [engine.module for engine in self._stages.values()]

    @property
    def units(self) -> list[LiveUnit]:
        """Units of this rank's stages: parameters that are gathered and reduced together."""
        return [unit for engine in self._stages.values() for unit in engine.units]

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets with gradients, of all stages of this rank."""
        return [bucket for engine in self._stages.values() for bucket in engine.buckets]

    def slices(self) -> dict[Options, list[nn.Parameter]]:
        """Return the slices that this rank updates, by optimizer options of all stages, in one order on every rank."""
        groups: dict[Options, list[nn.Parameter]] = {row.options: [] for row in self.table.rows if row.trainable}
        for engine in self._stages.values():
            for options, parameters in engine.slices().items():
                groups[options] += parameters
        return groups

    def check_parameters(self) -> None:
        """Raise ValueError when a parameter of the model was replaced since the plan was applied."""
        for engine in self._stages.values():
            engine.check_parameters()

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the squared norm of the summed gradient, fp64."""
        return torch.stack([engine.squared_norm() for engine in self._stages.values()]).sum()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that this rank owns by `factor`."""
        for engine in self._stages.values():
            if engine.buckets:
                engine.scale_gradients(factor)

    def publish(self) -> None:
        """Round this rank's masters to parameters, and send these to the ranks that use them."""
        for engine in self._stages.values():
            engine.publish()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of every parameter in table order (collective); valid until the next is yielded."""
        return self._from_holders(lambda engine: engine.own_parameters(), lambda row: row.dtype)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full reduced gradient) of each trainable parameter in table order (collective)."""
        precision = next(iter(self._stages.values())).storage.precision
        dtype = lambda row: precision.master_of(row.dtype)  # noqa: E731
        return self._from_holders(lambda engine: engine.own_gradients(), dtype, trainable=True)

    def full_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, value) of every buffer on every rank; the first stage that has the buffer broadcasts it."""
        for name, (index, like) in self._buffers.items():
            here = self._stages.get(index)
            value = torch.empty_like(like, device=self.world.device) if here is None else here.module.get_buffer(name)
            self.world.broadcast(value, axes="pp", source=self._ranks[index]).wait()
            yield name, value

    def saves(self, buffer: str) -> bool:
        """Return True if this rank saves a buffer: it is rank 0 of the first stage that has the buffer."""
        others = [axis for axis in self.world.mesh.names if axis != "pp"]
        holder = self._ranks[self._buffers[buffer][0]]
        return self.world.group("pp").index == holder and self.world.group(others).index == 0

    def memory(self) -> dict[str, int]:
        """Return bytes on this rank: `parameters`, `gradients`, `gathered_peak`, and `tier/kind` for other tiers."""
        total: Counter[str] = Counter()
        for engine in self._stages.values():
            total.update(engine.memory())
        return dict(total)

    def close(self) -> None:
        """Remove the hooks from the model."""
        for engine in self._stages.values():
            engine.close()

    def sum_ties(self) -> None:
        """Sum the gradients of each tied parameter over its stages; all of them then hold the sum (collective)."""
        for name, stages in self._tied().items():
            self._sum_tie(name, stages)

    def _tied(self) -> dict[str, list[int]]:
        """Return the stages that hold each tied parameter, in order, by its name."""
        holders: dict[str, list[int]] = {}
        for index, table in self._tables.items():
            for row in table.rows:
                if row.trainable:
                    holders.setdefault(row.name, []).append(index)
        return {name: stages for name, stages in holders.items() if len(stages) > 1}

    def _sum_tie(self, name: str, stages: Sequence[int]) -> None:
        own = {index: engine.accumulated(name) for index, engine in self._stages.items() if index in stages}
        here, first = self.world.group("pp").index, stages[0]
        if first in own:
            total = own[first]
            for index in stages[1:]:
                other = own.get(index)
                if other is None:
                    other = torch.empty_like(total)
                    self.world.recv(other, axis="pp", source=self._ranks[index]).wait()
                total.add_(other)
            away = {self._ranks[index] for index in stages} - {here}
            works = [self.world.send(total, axis="pp", to=rank) for rank in sorted(away)]
        else:
            total = torch.empty_like(next(iter(own.values()))) if own else torch.empty(0)
            works = [self.world.send(mine.clone(), axis="pp", to=self._ranks[first]) for mine in own.values()]
            if own:
                self.world.recv(total, axis="pp", source=self._ranks[first]).wait()
        for work in works:
            work.wait()
        for index in own.keys() - {first}:
            own[index].copy_(total)

    def _from_holders(
        self,
        own: Callable[[DataParallel], Iterator[Tensor]],
        dtype: Callable[[ParameterRow], torch.dtype],
        *,
        trainable: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of each stage's `own(engine)`, which its rank sends to the other ranks of `pp`."""
        for index, table in self._tables.items():
            here = self._stages.get(index)
            rows = [row for row in table.rows if row.trainable or not trainable]
            found = iter(()) if here is None else own(here)
            yield from from_holders(rows, own=found, world=self.world, dtype=dtype)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().to("meta") for name, buffer in module.named_buffers()}


class StagedRunner:
    """Runner for a rank that holds pipeline stages: a `MicrobatchRunner`."""

    def __init__(
        self,
        engine: StagedEngine,
        *,
        stages: Mapping[int, LiveStage],
        task: MicrobatchTask,
        schedule: Schedule,
        cut: ModelCut,
        shares_rows: bool,
    ) -> None:
        """`schedule`: computations alone, no transfers. `shares_rows`: several ranks split the rows of one matmul."""
        self.runs_empty = shares_rows or any(live.statistics.joined for live in stages.values())
        self.cut: ModelCut | None = cut
        self.counts = True
        self._copies = cut.writes
        self._engine, self._stages, self._task = engine, stages, task
        self._world = engine.world
        self._gathers = any(stage.engine.reduction.shards_parameters for stage in stages.values())
        self.schedule, self._plain = lower(schedule, gathers=self._gathers), schedule
        self.lines: AbstractSet[tuple[int, int]] = engine.lines | lines_of(self.schedule)
        self.evaluation_micro_batches = schedule.microbatches
        self._parameters = {index: StageParameters(live, tied=engine.tied) for index, live in stages.items()}
        runs = {index: live.stage for index, live in stages.items()}
        self._runtime = ScheduleInterpreter(runs, storages=self._parameters, world=self._world)

    @cached_property
    def _forwards(self) -> Schedule:
        """Schedule of forwards alone, for evaluation and prediction; built at its first use."""
        forwards = add_transfers(_forwards(self._plain))
        return add_gathers(forwards) if self._gathers else forwards

    def begin(self, step: int) -> None:
        """Begin step number `step`. Random draws depend on this number, so every step has its own."""
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

    def train(self, micro_batches: Sequence[MicroBatch], *, scale: float, on_count: OnCount) -> Sums:
        """Train on the micro-batches, as in `MicrobatchRunner.train`; loss and count are 0 except on the last stage."""
        sums = zeros(self._world)
        for parameters in self._parameters.values():
            parameters.begin(micro_batches)
        self._runtime.run(self.schedule, jobs=self._jobs(micro_batches, sums, scale))
        self._world.flight_recorder.doing = StepPhase.SETTLE
        on_count(sums[1])
        self._engine.sum_ties()
        for parameters in self._parameters.values():
            parameters.settle()
        return sums

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Sums:
        """Run all forwards; return loss and count of this rank's rows, which are 0 except on the last stage."""
        sums = zeros(self._world)
        for parameters in self._parameters.values():
            parameters.begin_forwards(micro_batches)
        self._runtime.run(self._forwards, jobs=self._jobs(micro_batches, sums))
        return sums

    def inspect(self, micro_batches: Sequence[MicroBatch], *, on_gradient: OnGradient) -> None:
        """Run forward and backward again, and pass each gradient to `on_gradient`; no gradient is kept or reduced."""
        for parameters in self._parameters.values():
            parameters.begin(micro_batches, on_gradient=on_gradient)
        self._runtime.run(self.schedule, jobs=self._jobs(micro_batches, zeros(self._world)))

    def predict(self, batch: Any) -> Any:
        """Return the output, broadcast from the last stage. Raises PlanError if a tensor of the output is all NaN."""

        def call(model: nn.Module) -> Any:
            return self._task.forward(model, self._given(batch))

        for parameters in self._parameters.values():
            parameters.begin_forwards(())
        returned = self._runtime.run(self._forwards, jobs={0: MicrobatchJob(call, (signature(batch), False))})
        skeleton, parts = pack({"output": whole_output(returned[0])}) if returned else (None, ())
        if names := "".join(self._world.exchange(_absent(returned[0]) if returned else "", axes="pp")):
            raise PlanError(
                f"predict would return NaN in {names}: an earlier stage computes it, and does not send it because the "
                "loss does not use it. Let the model not return it (of transformers: "
                "output_hidden_states=False, output_attentions=False), or the loss use it; or load a checkpoint under "
                "a plan without pp and predict there"
            )
        skeletons = self._world.exchange(skeleton, axes="pp")
        source = next(index for index, one in enumerate(skeletons) if one is not None)
        arrived = [
            torch.empty(spec.shape, dtype=spec.dtype, device=self._world.device)
            for spec in tensor_specs(skeletons[source])
        ]
        if skeleton is not None:
            arrived = [tensor.contiguous() for tensor in parts]
        for tensor in arrived:
            self._world.broadcast(tensor, axes="pp", source=source).wait()
        return unpack(skeletons[source], arrived=arrived)["output"]

    def _jobs(self, micro_batches: Sequence[MicroBatch], sums: Sums, scale: float = 1.0) -> dict[int, MicrobatchJob]:
        grads = torch.is_grad_enabled()
        return {
            index: MicrobatchJob(
                functools.partial(self._run, micro_batch, sums, scale), (signature(micro_batch.rows), grads)
            )
            for index, micro_batch in enumerate(micro_batches)
            if micro_batch.rows is not None
        }

    def _given(self, batch: Any) -> Any:
        """Return the batch on the device, copied if the model changes its batch in place."""
        rows = placed(batch, world=self._world)
        return map_tensors(torch.clone, rows) if self._copies else rows

    def _run(self, micro_batch: MicroBatch, sums: Sums, scale: float, model: nn.Module) -> Tensor:
        """Run this stage's forward of a micro-batch. The last stage adds loss and count to `sums`; returns the loss."""
        self.counts = micro_batch.counts
        rows = self._given(micro_batch.rows)
        loss, count = call_loss(model, rows, forward=self._task.forward, loss=self._task.loss)
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
    empty = [
        str(name)
        for name, value in entries
        if any(x.is_floating_point() and x.numel() and bool(x.isnan().all()) for x in tensors(value))
    ]
    return ", ".join(empty)


def _forwards(schedule: Schedule) -> Schedule:
    """Return a schedule of forwards alone: each rank runs a micro-batch in all its stages, then the next one."""
    return Schedule(
        tuple(
            tuple(
                Action(stage, ActionKind.F, index)
                for index, stage in itertools.product(range(schedule.microbatches), own)
            )
            for own in map(schedule.stages_of, range(schedule.ranks))
        )
    )

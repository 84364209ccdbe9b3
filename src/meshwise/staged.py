"""A model in stages: each stored and reduced by a `DataParallel` of its own, all run by the pipeline's interpreter.

What holds for a stage holds for the model: its table is the stages' one after the other, its norm the sum of theirs. A
parameter that several stages hold is one: their gradients are summed on the first of them, which sends the sum back, so
that every copy is updated alike; only the first one counts. Stages with such a parameter are reduced after that, at the
end of the step, the others as the schedule says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.comm.world import World
from meshwise.data_parallel.batch_norm import Statistics
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.engine import DataParallel
from meshwise.data_parallel.place import Options
from meshwise.data_parallel.unit import LiveUnit
from meshwise.microbatch import MicroBatch
from meshwise.model.draws import Draws
from meshwise.model.forward import call_loss
from meshwise.model.table import ParameterTable, Row
from meshwise.pipeline.action import Action, Kind, Schedule
from meshwise.pipeline.cut import Cut
from meshwise.pipeline.parcel import bones, pack, unpack
from meshwise.pipeline.passes import add_gathers, add_transfers, lower
from meshwise.pipeline.runtime import Job, Runtime
from meshwise.pipeline.stage import Stage, signature
from meshwise.sweep import Counted, Seen, Sums, Task, placed, scaled, zeros


@dataclass(frozen=True)
class LiveStage:
    """One stage on this rank."""

    stage: Stage
    engine: DataParallel
    draws: Draws
    statistics: Statistics


class StagedEngine:
    """All stages: an `Engine`."""

    def __init__(self, stages: Mapping[int, DataParallel], *, ranks: Sequence[int], world: World) -> None:
        """`stages` are this rank's, `ranks` where each stage of all is, by index along `pp`. Every rank calls it."""
        self.world = world
        self.tiers = next(iter(stages.values())).tiers
        self._stages = stages
        self._ranks = ranks
        own = {index: (engine.table, _buffers(engine.module)) for index, engine in stages.items()}
        told = {index: told for ranks in world.exchange(own, axes="pp") for index, told in ranks.items()}
        # In a rehearsal, stages that are like another one are not there to tell.
        self._tables = {index: told[index][0] for index in sorted(told)}
        first: dict[str, tuple[int, Tensor]] = {}
        for index in self._tables:
            for name, like in told[index][1].items():
                first.setdefault(name, (index, like))
        self._buffers = first
        units = [
            dataclasses.replace(unit, rows=tuple(row for row in unit.rows if not row.spare))
            for table in self._tables.values()
            for unit in table.units
        ]
        self.table = ParameterTable(tuple(unit for unit in units if unit.rows))

    @property
    def tied(self) -> frozenset[str]:
        """The parameters that several stages hold."""
        return frozenset(row.name for table in self._tables.values() for row in table.rows if row.spare)

    @property
    def module(self) -> nn.Module:
        """The stage's module, or a list of them."""
        return self.modules[0] if len(self._stages) == 1 else nn.ModuleList(self.modules)

    @property
    def modules(self) -> list[nn.Module]:
        """Those of the stages."""
        return [engine.module for engine in self._stages.values()]

    @property
    def units(self) -> list[LiveUnit]:
        """Those of the stages."""
        return [unit for engine in self._stages.values() for unit in engine.units]

    @property
    def buckets(self) -> list[Bucket]:
        """Those of the stages that have gradients."""
        return [bucket for engine in self._stages.values() for bucket in engine.buckets]

    def slices(self) -> dict[Options, list[nn.Parameter]]:
        """What an optimizer updates on this rank, by options: the same options in the same order on every rank."""
        groups: dict[Options, list[nn.Parameter]] = {row.options: [] for row in self.table.rows if row.trainable}
        for engine in self._stages.values():
            for options, parameters in engine.slices().items():
                groups[options] += parameters
        return groups

    def check_parameters(self) -> None:
        """Raise ValueError when a parameter of the model is not what it was when the plan was applied."""
        for engine in self._stages.values():
            engine.check_parameters()

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared norm of the summed gradient, fp64."""
        return torch.stack([engine.squared_norm() for engine in self._stages.values()]).sum()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the owned gradients."""
        for engine in self._stages.values():
            if engine.buckets:
                engine.scale_gradients(factor)

    def publish(self) -> None:
        """Bring what this rank holds of the masters to the ranks that use them."""
        for engine in self._stages.values():
            engine.publish()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) in table order, on every rank; the tensor is valid until the next one is asked for."""
        return self._from_holders(lambda engine: engine.full_parameters(), lambda row: row.dtype)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full reduced gradient) of the trainable parameters in table order, on every rank."""
        precision = next(iter(self._stages.values())).keeping.precision
        dtype = lambda row: precision.master_of(row.dtype)  # noqa: E731
        return self._from_holders(lambda engine: engine.full_gradients(), dtype, trainable=True)

    def full_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of the buffers, on every rank, from the first stage that has each."""
        for name, (index, like) in self._buffers.items():
            here = self._stages.get(index)
            value = torch.empty_like(like, device=self.world.device) if here is None else here.module.get_buffer(name)
            self.world.broadcast(value, axes="pp", source=self._ranks[index]).wait()
            yield name, value

    def saves(self, buffer: str) -> bool:
        """Whether this rank is the one that saves a buffer."""
        others = [axis for axis in self.world.mesh.names if axis != "pp"]
        holder = self._ranks[self._buffers[buffer][0]]
        return self.world.group("pp").index == holder and self.world.group(others).index == 0

    def memory(self) -> dict[str, int]:
        """Bytes of parameters and gradients on this rank, and of the parameters that were gathered at most."""
        total: Counter[str] = Counter()
        for engine in self._stages.values():
            total.update(engine.memory())
        return dict(total)

    def close(self) -> None:
        """Remove the hooks from the model."""
        for engine in self._stages.values():
            engine.close()

    def sum_ties(self) -> None:
        """Sum the gradients of each parameter that several stages hold, on all of them."""
        holders: dict[str, list[int]] = {}
        for index, table in self._tables.items():
            for row in table.rows:
                if row.trainable:
                    holders.setdefault(row.name, []).append(index)
        for name, stages in holders.items():
            if len(stages) > 1:
                self._sum_tie(name, stages)

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
        values: Callable[[DataParallel], Iterator[tuple[str, Tensor]]],
        dtype: Callable[[Row], torch.dtype],
        *,
        trainable: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """The values of every stage's engine, sent by its rank to the others along `pp`."""
        for index, table in self._tables.items():
            here = self._stages.get(index)
            found = iter(()) if here is None else values(here)
            for row in table.rows:
                if row.trainable or not trainable:
                    value = torch.empty(row.shape, dtype=dtype(row), device=self.world.device)
                    if here is not None:
                        name, value = next(found)
                        assert name == row.name
                    if not row.spare:
                        value = value.contiguous()
                        self.world.broadcast(value, axes="pp", source=self._ranks[index]).wait()
                        yield row.name, value
            for _ in found:
                raise AssertionError("a stage has more parameters than its table")


class StagedSweep:
    """This rank runs stages."""

    def __init__(
        self,
        engine: StagedEngine,
        *,
        stages: Mapping[int, LiveStage],
        task: Task,
        schedule: Schedule,
        cut: Cut,
        rows_meet: bool,
    ) -> None:
        """`rows_meet`: ranks share out the rows of one product."""
        self.lockstep = rows_meet or any(live.statistics.joined for live in stages.values())
        self.cut: Cut | None = cut
        self._engine, self._stages, self._task = engine, stages, task
        self._world = engine.world
        zero = max(stage.engine.zero for stage in stages.values())
        self.schedule = lower(schedule, zero=zero)
        forwards = add_transfers(_forwards(schedule))
        self._forwards = add_gathers(forwards) if zero == 3 else forwards
        self.evaluated_in = schedule.microbatches
        self._keepers = {index: _Keeper(live, tied=engine.tied) for index, live in stages.items()}
        runs = {index: live.stage for index, live in stages.items()}
        self._runtime = Runtime(runs, keepers=self._keepers, world=self._world)

    def begin(self, step: int) -> None:
        """A step begins: any number that no other step has."""
        for live in self._stages.values():
            live.draws.begin(step)

    def finish(self) -> None:
        """The step's forwards and backwards are over."""
        for live in self._stages.values():
            live.draws.finish()

    def close(self) -> None:
        """Take the hooks off the model."""
        for live in self._stages.values():
            live.draws.close()

    def train(self, parts: Sequence[MicroBatch], *, scale: float, counted: Counted) -> Sums:
        """Forward, backward of the loss times `scale`, and reduction; the loss and the count of this rank."""
        sums = zeros(self._world)
        for keeper in self._keepers.values():
            keeper.begin(parts)
        self._runtime.run(self.schedule, jobs=self._jobs(parts, sums, scale))
        self._world.journal.doing = "settle"
        counted(sums[1])
        self._engine.sum_ties()
        for keeper in self._keepers.values():
            keeper.settle()
        return sums

    def evaluate(self, parts: Sequence[MicroBatch]) -> Sums:
        """Forward of every micro-batch; the loss and the count of this rank."""
        sums = zeros(self._world)
        self._runtime.run(self._forwards, jobs=self._jobs(parts, sums))
        return sums

    def inspect(self, parts: Sequence[MicroBatch], *, seen: Seen) -> None:
        """Forward and backward again, for the gradients to be looked at."""
        for keeper in self._keepers.values():
            keeper.begin(parts, seen=seen)
        self._runtime.run(self.schedule, jobs=self._jobs(parts, zeros(self._world)))

    def predict(self, batch: Any) -> Any:
        """The output for a batch, which the last stage sends to the others."""
        call = lambda model: self._task.forward(model, placed(batch, world=self._world))  # noqa: E731
        returned = self._runtime.run(self._forwards, jobs={0: Job(call, (signature(batch), False))})
        parcel = pack({"output": returned[0]}) if returned else None
        told = self._world.exchange(parcel and parcel.skeleton, axes="pp")
        source = next(index for index, skeleton in enumerate(told) if skeleton is not None)
        arrived = [torch.empty(bone.shape, dtype=bone.dtype, device=self._world.device) for bone in bones(told[source])]
        if parcel is not None:
            arrived = [tensor.contiguous() for tensor in parcel.tensors]
        for tensor in arrived:
            self._world.broadcast(tensor, axes="pp", source=source).wait()
        return unpack(told[source], arrived=arrived)["output"]

    def _jobs(self, parts: Sequence[MicroBatch], sums: Sums, scale: float = 1.0) -> dict[int, Job]:
        grads = torch.is_grad_enabled()
        return {
            index: Job(functools.partial(self._run, part, sums, scale), (signature(part.rows), grads))
            for index, part in enumerate(parts)
            if part.rows is not None
        }

    def _run(self, part: MicroBatch, sums: Sums, scale: float, model: nn.Module) -> Tensor:
        """Forward and loss of one micro-batch; only on the last stage it comes to an end, and counts."""
        rows = placed(part.rows, world=self._world)
        loss, count = call_loss(model, rows, forward=self._task.forward, loss=self._task.loss)
        if not part.counts:
            return scaled(loss, by=0.0)
        sums[0].add_(loss.detach().double())
        sums[1].add_(count)
        return scaled(loss, by=scale)


class _Keeper:
    """Keeps the parameters of one stage for the interpreter."""

    def __init__(self, live: LiveStage, *, tied: frozenset[str]) -> None:
        self._engine, self._draws, self._statistics = live.engine, live.draws, live.statistics
        self._late = any(row.name in tied for row in live.engine.table.rows)
        self._parts: Sequence[MicroBatch] = ()
        self._seen: Seen | None = None
        self._index = 0
        self._waits = False

    def begin(self, parts: Sequence[MicroBatch], *, seen: Seen | None = None) -> None:
        """A step begins; with `seen`, one whose gradients are only looked at."""
        self._parts, self._seen, self._waits = parts, seen, False
        if seen is None:
            self._engine.begin_step()
        self._engine.accumulate(None if seen is None else self._show)

    def running(self, index: int, *, again: bool) -> contextlib.AbstractContextManager[None]:
        """Inside, the stage runs micro-batch `index`: forward, or (`again`) backward."""
        self._index = index
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return self._inside(self._parts[index], again=again)

    @contextlib.contextmanager
    def _inside(self, part: MicroBatch, *, again: bool) -> Iterator[None]:
        with (
            self._draws.running(part.samples, again=again),
            self._statistics.running(counts=part.counts, again=again),
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

    def _show(self, row: Row, gradient: Tensor) -> None:
        assert self._seen is not None
        self._seen(self._index, row, gradient)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().to("meta") for name, buffer in module.named_buffers()}


def _forwards(schedule: Schedule) -> Schedule:
    """Every micro-batch through every stage, one after the other."""
    return Schedule(
        tuple(
            tuple(Action(stage, Kind.F, index) for index, stage in itertools.product(range(schedule.microbatches), own))
            for own in map(schedule.stages_of, range(schedule.ranks))
        )
    )

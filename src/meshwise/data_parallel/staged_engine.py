"""Store the parameters of a rank that holds pipeline stages: one engine for each stage, combined into a `StagedEngine`.

Its table lists the parameters of all stages, its norm covers all of this rank's stages. A tied parameter is one that
several stages hold. Its gradients are summed on the first of these stages, which sends the sum back, so every copy gets
the same update. In tables and norms only the first copy counts.

`Engine` is the type of a rank's storage with or without stages."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_place import Options
from meshwise.data_parallel.data_parallel_engine import DataParallel, from_holders
from meshwise.data_parallel.live_unit import LiveUnit
from meshwise.model.parameter_table import ParameterRow, ParameterTable


class StagedEngine:
    """Engine of a rank that holds pipeline stages: passes each call to the engines of its stages."""

    def __init__(self, stages: Mapping[int, DataParallel], *, ranks: Sequence[int], world: World) -> None:
        """Exchange the tables of all stages (collective). `stages`: engines of this rank's stages by stage index.

        `ranks`: for each stage of the model, the index along `pp` of the rank that holds it."""
        self.world = world
        self.tiers = next(iter(stages.values())).tiers
        self._stages = stages
        self._ranks = ranks
        own = {}
        for index, engine in stages.items():
            own[index] = engine.table, {name: like.detach().to("meta") for name, like in engine.module.named_buffers()}
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


Engine: TypeAlias = DataParallel | StagedEngine
"""A rank's parameters, gradients and their collectives. Both classes have the methods that the trainer calls."""

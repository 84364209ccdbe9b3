"""Combine the `DataParallel`s of a rank's pipeline stages into one `Engine`, and sum gradients of tied parameters.

A plan without pp has one stage, on every rank. The engine's table lists the parameters of all stages, its norm covers
all of this rank's stages. A tied parameter is one that several stages hold. Its gradients are summed on the first of
these stages, which sends the sum back, so all copies get the same update. Tables and norms count the first copy."""

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World, wait_all
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_layout import Options
from meshwise.data_parallel.data_parallel_engine import DataParallel
from meshwise.data_parallel.live_unit import LiveUnit
from meshwise.model.parameter_table import ParameterRow, ParameterTable


class Engine:
    """The parameters and gradients of a rank: passes each call to the engines of its stages."""

    def __init__(self, stages: Mapping[int, DataParallel], *, ranks: Sequence[int], world: World) -> None:
        """Exchange the tables of all stages (collective). `stages`: engines of this rank's stages by stage index.

        `ranks`: for each stage of the model, the index along `pp` of the rank that holds it."""
        self.world = world
        self.tiers = next(iter(stages.values())).tiers
        self.owned: dict[nn.Parameter, ParameterRow] = {}
        """Rows of the whole parameters whose optimizer state this rank has, by the key of the state."""
        self.given: list[tuple[str, nn.Parameter, bool]] = []
        """(name, parameter, requires_grad) of a model that was given with values, if stages have replaced it."""
        self.fixed_by = ""
        """Key of the plan or optimizer under which no parameter may be frozen between steps; "" if there is none."""
        self.cuts = 0
        """Number of times that slices were cut, or frozen, or unfrozen."""
        self.frozen_digest = 0
        """CRC-32 of the names of frozen parameters, from a change until the ranks have agreed on it; then 0."""
        self.modules = [engine.module for engine in stages.values()]
        """Modules of this rank's stages, in the order of the stages."""
        self.module = self.modules[0] if len(stages) == 1 else nn.ModuleList(self.modules)
        """Module of this rank's stage; a ModuleList if the rank has several stages."""
        self.units: list[LiveUnit] = [unit for engine in stages.values() for unit in engine.units]
        """Units of this rank's stages: parameters that are gathered and reduced together."""
        self.buckets: list[Bucket] = [bucket for engine in stages.values() for bucket in engine.buckets]
        """Buckets with gradients, of all stages of this rank."""
        self._stages = stages
        self._ranks = ranks
        own = {}
        for index, engine in stages.items():
            own[index] = engine.table, {name: like.detach().to("meta") for name, like in engine.module.named_buffers()}
        of_all = {index: stage for ranks in world.exchange(own, axes="pp") for index, stage in ranks.items()}
        # A rehearsal leaves out stages that equal another one.
        self._tables = {index: of_all[index][0] for index in sorted(of_all)}
        self._buffers: dict[str, tuple[int, Tensor]] = {}
        for index in self._tables:
            for name, like in of_all[index][1].items():
                self._buffers.setdefault(name, (index, like))
        units = [
            dataclasses.replace(unit, rows=tuple(row for row in unit.rows if not row.counted_elsewhere))
            for table in self._tables.values()
            for unit in table.units
        ]
        self.table = ParameterTable(tuple(unit for unit in units if unit.rows))
        rows = (row for table in self._tables.values() for row in table.rows)
        self.tied = frozenset(row.name for row in rows if row.counted_elsewhere)
        """Names of the parameters that several stages hold."""

    @property
    def lines(self) -> frozenset[tuple[int, int]]:
        """(source, target) of the messages between the copies of tied parameters, as indices along `pp`."""
        ends = [(self._ranks[stages[0]], self._ranks[index]) for stages in self._tied.values() for index in stages]
        return frozenset((a, b) for first, other in ends for a, b in ((first, other), (other, first)) if a != b)

    def slices(self) -> dict[Options, list[nn.Parameter]]:
        """Return the slices that this rank updates, by optimizer options of all stages, in one order on every rank."""
        groups: dict[Options, list[nn.Parameter]] = {row.options: [] for row in self.table.rows if row.trainable}
        for bucket in self.buckets:
            for options, parameter in bucket.slices:
                groups[options].append(parameter)
        return groups

    def check_parameters(self) -> None:
        """Raise ValueError if a parameter's dtype, tensor or values were changed, or a frozen one was made trainable.

        Changed values are noticed only if the parameter has a separate master or is in shared memory."""
        for name, parameter, before in self.given:
            if parameter.requires_grad != before:
                raise ValueError(
                    f"requires_grad of {name!r} was changed in the model that parallelize was given, and under pp the "
                    "stages hold its parameters; change it in trainer.model"
                )
        for unit in self.units:
            if what := unit.change_message(fixed_by=self.fixed_by):
                raise ValueError(what)

    def follow_requires_grad(self) -> dict[nn.Parameter, list[nn.Parameter]]:
        """Freeze and unfreeze parameters by their `requires_grad`; return the slices that were cut."""
        found = [parts for unit in self.units if (parts := unit.follow_requires_grad()) is not None]
        if found:
            names = sorted(name for name, off in self.frozen().items() if off)
            self.cuts, self.frozen_digest = self.cuts + 1, zlib.crc32(repr(names).encode())
        return {whole: own for parts in found for whole, own in parts.items()}

    def frozen(self) -> dict[str, bool]:
        """Return for each trainable parameter of this rank, by name, True if its `requires_grad` is off.

        Raises ValueError if two stages of this rank hold a tied parameter and one of them has frozen it."""
        pieces = ((piece, off) for one in self.buckets for piece, off in zip(one.place.pieces, one.frozen, strict=True))
        found: dict[str, bool] = {}
        for piece, off in pieces:
            if found.setdefault(piece.row.name, off) != off:
                raise ValueError(
                    f"requires_grad of {piece.row.name!r} differs between two stages of this rank, which share it; set "
                    "it for all parameters of that name in trainer.model"
                )
        return found

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the squared norm of the summed gradient, fp64."""
        return torch.stack([engine.squared_norm() for engine in self._stages.values()]).sum()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that this rank owns by `factor`."""
        for engine in self._stages.values():
            engine.scale_gradients(factor)

    def wait_updated(self) -> None:
        """Wait for the updated parameters that under `overlap_gather` may still be under way."""
        for unit in self.units:
            if unit.overlaps:
                unit.ready()

    def publish(self) -> None:
        """Round this rank's masters into the parameters; send these to the ranks unless they gather before each use."""
        for bucket in self.buckets:
            bucket.round_off()
        held = [bucket for unit in self.units for bucket in unit.buckets]
        for bucket in held:
            bucket.second_is_current = False  # frozen parameters too: a checkpoint may have set them
        wait_all([bucket.publish() for bucket in held if bucket.trainable or bucket.shared])

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of every parameter in table order (collective); valid until the next is yielded."""
        return self._full_tensors(gradients=False)

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full reduced gradient) of each trainable parameter in table order (collective)."""
        return self._full_tensors(gradients=True)

    def _full_tensors(self, *, gradients: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of each row on every rank; a rank that holds the parameter broadcasts it."""
        world, mesh = self.world, self.world.mesh
        master = next(iter(self._stages.values())).storage.precision.master_of
        for index, table in self._tables.items():
            own: Iterator[Tensor] = iter(())
            if stage := self._stages.get(index):
                reduced = (gradient for _, gradient in stage.full_tensors(Bucket.owned_gradient))
                own = reduced if gradients else stage.own_parameters()
            for row in [row for row in table.rows if row.trainable or not gradients]:
                value = next(own) if row.is_on(mesh, rank=world.rank) else None
                if row.counted_elsewhere:
                    continue
                if row.held_at:
                    group = world.group(tuple(axis for axis, _ in row.held_at))
                    source = next(n for n, rank in enumerate(group.ranks) if row.is_on(mesh, rank=rank))
                    if value is None:
                        dtype = master(row.dtype) if gradients else row.dtype
                        value = torch.empty(row.shape, dtype=dtype, device=world.device)
                    value = value.contiguous()
                    world.broadcast(value, axes=group.axes, source=source).wait()
                assert value is not None
                yield row.name, value
            for _ in own:
                raise AssertionError("a rank holds more parameters than the table says")

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
        """Return bytes on this rank by kind: `parameters` (with masters), `gradients`, `reduction` (its state, if any).

        Keys of tensors on another tier begin with it: `cpu/parameters`, `disk/gradients`. `gathered_peak` is the most
        that gathered ZeRO-3 units have taken at once since the start."""
        held = [each for unit in self.units for bucket in unit.buckets for each in bucket.tensors()]
        peak = sum(stage.gatherer.peak for stage in self._stages.values())
        return {"parameters": 0, "gradients": 0, **self.tiers.bytes(held), "gathered_peak": peak}

    def close(self) -> None:
        """Remove the hooks from the model, and wait for updated parameters."""
        for engine in self._stages.values():
            engine.close()
        self.wait_updated()

    def sum_ties(self) -> None:
        """Sum the gradients of each tied parameter over its stages; all of them then hold the sum (collective)."""
        here = self.world.group("pp").index
        for name, stages in self._tied.items():
            own = {index: engine.accumulated(name) for index, engine in self._stages.items() if index in stages}
            first = stages[0]
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
            wait_all(works)
            for index in own.keys() - {first}:
                own[index].copy_(total)

    @cached_property
    def _tied(self) -> dict[str, list[int]]:
        """Stages that hold each tied parameter, in order, by its name."""
        holders: dict[str, list[int]] = {}
        for index, table in self._tables.items():
            for row in table.rows:
                if row.trainable:
                    holders.setdefault(row.name, []).append(index)
        return {name: stages for name, stages in holders.items() if len(stages) > 1}

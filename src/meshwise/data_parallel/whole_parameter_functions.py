"""Give an optimizer of slices what needs whole parameters: their norms (LARS), or a function of each (Muon).

A function of whole parameters runs on one rank for each of them: gather the parameter there, send the result back.
Each parameter has an owner among the ranks that hold parts of it. A wave has one parameter for each owner:

    | owner 0 | gather a | f(a), gather c | send a, f(c) | send c |
    | owner 1 | gather b | f(b), gather d | send b, f(d) | send d |

The largest remaining parameter goes to the owner with the fewest elements so far. docs/large_batch.md has the elements
that all ranks send ("Optimizers"). If several ranks hold copies (zero=0), the nearest to the owner sends.

`exchange` sums momenta of R ranks through a codec. Rank r sends beta m / R + (1 - beta) g_r plus its error. The
g_r add up to the gradient. m is the momentum before; zero=1 keeps a full copy, gathered before the first exchange."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.comm.api.world import Work, World
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_layout import ALIGNMENT, BucketPlace
from meshwise.data_parallel.checkpoint_slices import optimizer_slices, slice_pieces
from meshwise.data_parallel.data_parallel_engine import DataParallel
from meshwise.data_parallel.gradient_reduction import ZERO, ReducingRanks, Reduction, compressed
from meshwise.data_parallel.stage_engines import Engine
from meshwise.model.parameter_table import ParameterRow
from meshwise.model.whole_parameters import (
    Groups,
    LogicalTensors,
    OwnedTensor,
    SlicePart,
    SliceTensors,
    WholeFunction,
    key_of,
)


class RankPart(NamedTuple):
    """Elements [start, stop) that a rank updates, of its flattened part of a parameter; `sent` of them to the owner."""

    rank: int
    start: int
    stop: int
    sent: int


class OwnedParameter(NamedTuple):
    """A parameter with its owner (an index of the group), and the parts of all ranks of the group, in group order.

    | bucket   the bucket of this rank's part, of which it is piece `number`
    | key      as in `OwnedTensor`"""

    row: ParameterRow
    owner: int
    parts: tuple[RankPart, ...]
    bucket: Bucket
    number: int
    key: nn.Parameter

    @property
    def slices(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """(optimizer's slice, elements of it) for each slice of this rank that has elements of the parameter."""
        piece = self.bucket.place.pieces[self.number]
        return ((p, here) for p, _, here, _ in slice_pieces(self.bucket, within=(piece.start, piece.stop)))


Values: TypeAlias = Sequence[Mapping[nn.Parameter, Tensor]]
"""Tensors of the shapes of the optimizer's slices, by slice. Results are written to the first ones."""


class Wave(NamedTuple):
    """One parameter for each owner along `axes`, None for an owner that has none left; `dtype` of the masters."""

    world: World
    axes: tuple[str, ...]
    dtype: torch.dtype
    owned: Sequence[OwnedParameter | None]

    def steps(self, values: Values, *, function: WholeFunction, dtype: torch.dtype | None) -> Iterator[None]:
        """Start to gather the parameters; then compute this rank's one and start to send the result; then store."""
        world, mesh, me = self.world, self.world.mesh, self.world.group(self.axes).index
        nothing = torch.empty(0, dtype=dtype or self.dtype, device=world.device)
        own, mine = self.owned[me], [(one, one.parts[me]) if one else None for one in self.owned]

        received = [nothing for _ in self.owned]
        if own:
            received = [nothing.new_empty(part.sent * len(values)) for part in own.parts]
        sends = [
            torch.cat([each[p].view(-1)[here].to(nothing.dtype) for each in values for p, here in it[0].slices])
            if it and it[1].sent
            else nothing
            for it in mine
        ]
        work = Work()
        if any(part.sent for one in self.owned if one for at, part in enumerate(one.parts) if at != one.owner):
            work = world.all_to_all(sends, into=received, axes=self.axes)
        else:
            received[me] = sends[me]
        yield
        work.wait()
        sends = [nothing for _ in self.owned]
        if own:
            gathered = zip(*(part.tensor_split(len(values)) for part in received), strict=True)
            result = function(own.key, *(_full(own, parts, world) for parts in gathered)).to(nothing.dtype)
            for index, part in enumerate(own.parts):
                sends[index] = own.row.part(result, mesh=mesh, rank=part.rank).reshape(-1)[part.start : part.stop]
        received = [nothing.new_empty(it[1].stop - it[1].start) if it else nothing for it in mine]
        work = world.all_to_all(sends, into=received, axes=self.axes)
        yield
        work.wait()
        for one, flat in zip(self.owned, received, strict=True):
            for parameter, here in one.slices if one else ():
                values[0][parameter].view(-1)[here], flat = flat.tensor_split([here.stop - here.start])


class ParameterOwners:
    """Division of whole-parameter work among ranks. It depends only on the plan and the names, so all ranks agree."""

    def __init__(self, buckets: Sequence[Bucket], *, names: frozenset[str]) -> None:
        """`buckets`: of this rank. `names`: of the parameters to divide."""
        found: dict[tuple[tuple[str, ...], torch.dtype], list[tuple[int, Bucket, int]]] = {}
        for bucket in buckets:
            assert bucket.master is not None
            for number, piece in enumerate(bucket.place.pieces):
                if piece.row.name in names:
                    mesh, held = bucket.world.mesh, dict(piece.row.held_at)
                    axes = tuple(axis for axis in mesh.names if axis not in (*held, *bucket.storage.sync_axes))
                    found.setdefault((axes, bucket.master.dtype), []).append((piece.row.numel, bucket, number))
        self._waves: list[Wave] = []
        self.own: list[OwnedParameter] = []
        """The parameters that this rank computes."""
        for (axes, dtype), pieces in found.items():
            world = pieces[0][1].world
            queues: list[list[OwnedParameter]] = [[] for _ in world.group(axes).ranks]
            loads = [0] * len(queues)
            for numel, bucket, number in sorted(pieces, key=lambda one: -one[0]):
                owner = loads.index(min(loads))
                loads[owner] += numel
                queues[owner].append(_owned(bucket, number, owner=owner, axes=axes))
            self.own += queues[world.group(axes).index]
            self._waves += [Wave(world, axes, dtype, owned) for owned in zip_longest(*queues)]

    def run(self, values: Values, *, function: WholeFunction, dtype: torch.dtype | None) -> None:
        """Replace `values[0]` of each parameter by `function(key, full tensors)`; arguments as in `LogicalTensors`.

        Frozen parameters are left out."""
        waves = []
        for wave in self._waves:
            owned = [one if one and not one.bucket.frozen[one.number] else None for one in wave.owned]
            if any(owned):
                waves.append(wave._replace(owned=owned).steps(values, function=function, dtype=dtype))
        for last in range(len(waves) + 2):
            for running in reversed(waves[max(0, last - 2) : last + 1]):
                next(running, None)


def _full(own: OwnedParameter, received: Sequence[Tensor], world: World) -> Tensor:
    """Return the full tensor of a parameter from the parts that the ranks of the group sent."""
    row, mesh = own.row, world.mesh
    full = received[0].new_empty(row.shape)
    stored: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
    for part, values in zip(own.parts, received, strict=True):
        if part.sent:
            place = tuple(mesh.coordinate(part.rank)[axis] for axis in row.layout.axes)
            stored.setdefault(place, []).append((part.rank, values))
    for found in stored.values():
        rank, shape = found[0][0], row.layout.local_shape(row.shape, mesh=mesh, rank=found[0][0])
        row.put(torch.cat([values for _, values in found]).view(shape), into=full, mesh=mesh, rank=rank)
    return full


def _owned(bucket: Bucket, number: int, *, owner: int, axes: tuple[str, ...]) -> OwnedParameter:
    """Return piece `number` of a bucket as a parameter whose owner has the index `owner` along `axes`."""
    piece, mesh = bucket.place.pieces[number], bucket.world.mesh
    ranks, is_split = bucket.world.group(axes).ranks, bucket.storage.reduction.shards_updates
    copies = [*piece.row.copy_axes(mesh), *(bucket.outer if is_split else mesh.expand(piece.row.summed))]
    rows = [one.row for one in bucket.place.pieces]
    shard_axes = mesh.expand(bucket.axes)
    parts = []
    for rank in ranks:
        shapes = {row.name: row.layout.local_shape(row.shape, mesh=mesh, rank=rank) for row in rows}
        place = BucketPlace.of(rows, shapes=shapes, parts=bucket.group.size)
        there = place.pieces[number]
        first, last = place.shard(mesh.group(rank, axes=shard_axes).index(rank)) if is_split else (0, place.size)
        low = max(there.start, first) - there.start
        high = max(low, min(there.stop, last) - there.start)
        near = all(mesh.coordinate(rank)[axis] == mesh.coordinate(ranks[owner])[axis] for axis in copies)
        parts.append(RankPart(rank, low, high, near * (high - low)))
    assert bucket.master is not None
    key = key_of(piece.row.shape, dtype=bucket.master.dtype, device=bucket.device)
    return OwnedParameter(piece.row, owner, tuple(parts), bucket, number, key)


class LogicalSlices(LogicalTensors):
    """`LogicalTensors` that an optimizer receives as `logical` under a plan.

    `squared_norms` is one all-reduce of one fp64 number for each trainable parameter, over all axes but `sync_axes`."""

    def __init__(self, engine: Engine, *, sync_axes: Sequence[str] = (), every: int = 0) -> None:
        self._engine, self.every, self.replicas = engine, every, engine.world.group(tuple(sync_axes)).size
        self._names = [row.name for row in engine.table.rows if row.trainable]
        self._axes = tuple(axis for axis in engine.world.mesh.names if axis not in sync_axes)
        self._owners: dict[frozenset[str], ParameterOwners] = {}
        self._cuts = -1
        self._parts: dict[nn.Parameter, list[SlicePart]] = {}

    def parts(self, parameter: nn.Parameter) -> Sequence[SlicePart]:
        """Return the parts of an optimizer's slice, one for each model parameter in it, in order."""
        if self._cuts != self._engine.cuts:
            self._cuts = self._engine.cuts
            self._parts.clear()
            for bucket in self._engine.buckets:
                for slice_, piece, here, _ in slice_pieces(bucket):
                    part = SlicePart(piece.row.name, here.start, here.stop, piece.row.shape)
                    self._parts.setdefault(slice_, []).append(part)
        return self._parts.get(parameter, ())  # a slice may be padding alone

    def squared_norms(self, values: SliceTensors, *, order: float = 2) -> Mapping[str, Tensor]:
        """Return the squared norm of `values` over each whole parameter, by name: fp64 scalars (a collective).

        The norm of a parameter without values on any rank is 0."""
        world = self._engine.world
        totals = torch.zeros(len(self._names), dtype=torch.float64, device=world.device)
        index = {name: number for number, name in enumerate(self._names)}
        for bucket in self._engine.buckets:
            if bucket.counts:
                for parameter, piece, here, _ in slice_pieces(bucket, within=bucket.shard):
                    if parameter in values:
                        square = torch.linalg.vector_norm(values[parameter][here], ord=order).double().square()
                        total = totals[index[piece.row.name]]
                        total.copy_(total + square if order == 2 else torch.maximum(total, square))
        world.all_reduce(totals, axes=self._axes, op="sum" if order == 2 else "max").wait()
        return dict(zip(self._names, totals, strict=True))

    def exchange(self, momenta: SliceTensors, *lost: SliceTensors, betas: Mapping[str, float], codec: str) -> None:
        """Move momenta towards the mean gradient of the replicas, encoded; see `LogicalTensors`."""
        reduction = compressed(ZERO[0], wire=codec, feedback=True)
        one = partial(_mean, tensors=(momenta, *lost)) if lost else partial(_exchange, momenta=momenta, betas=betas)
        exchanges = [one(bucket, by=reduction) for bucket in self._engine.buckets]
        for exchange, before in zip_longest(exchanges, [iter(()), *exchanges], fillvalue=iter(())):
            next(exchange, None)  # one bucket travels while the next one is encoded
            next(before, None)

    def owned(self, groups: Groups) -> Sequence[OwnedTensor]:
        """Return the whole parameters of `groups` that this rank computes, and let checkpoints have their state."""
        group_of = {name: group for group in groups for name in group["names"]}
        own = self._owners_of(groups).own
        self._engine.owned.update((one.key, one.row) for one in own)
        return [(one.row.name, one.key, group_of[one.row.name]) for one in own]

    def map_whole(
        self,
        values: SliceTensors,
        *more: SliceTensors,
        groups: Groups,
        function: WholeFunction,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Replace the `values` of each whole parameter of `groups` by `function` of them; see `LogicalTensors`."""
        self._owners_of(groups).run((values, *more), function=function, dtype=dtype)

    def _owners_of(self, groups: Groups) -> ParameterOwners:
        names = frozenset(name for group in groups for name in group["names"])
        if names not in self._owners:
            self._owners[names] = ParameterOwners(self._engine.buckets, names=names)
        return self._owners[names]


def _exchange(bucket: Bucket, *, momenta: SliceTensors, betas: Mapping[str, float], by: Reduction) -> Iterator[None]:
    """Start to sum the momenta of a bucket's ranks; then put the sum into `momenta`."""
    state, size = bucket.reduction_state, bucket.group.size
    whole = state.get("momentum")
    if whole is None:
        whole = bucket.gathered_from(torch.cat([momenta[parameter] for _, parameter in bucket.slices]))
    message = bucket.reduced_gradient.clone()
    for piece in bucket.place.pieces:
        beta, here = betas[piece.row.name], slice(piece.start, piece.stop)
        message[here].mul_(1 - beta).add_(whole[here], alpha=beta / size)
    work = by.start(message, into=None, peers=bucket.peers).work
    yield
    work.wait()
    if bucket.storage.reduction.shards_updates:
        state["momentum"] = message
    for part, parameter in optimizer_slices(bucket):
        momenta[parameter].copy_(message[part.start : part.stop])


def _mean(bucket: Bucket, *, tensors: Sequence[SliceTensors], by: Reduction) -> Iterator[None]:
    """Start to sum the momenta of a bucket's replicas; then put their mean and the errors into `tensors`."""
    axes, group = bucket.outer, bucket.world.group(bucket.outer)
    size = -(-bucket.place.size // (ALIGNMENT * group.size)) * ALIGNMENT * group.size
    place = dataclasses.replace(bucket.place, size=size, parts=group.size)
    joined = (torch.cat([each[parameter] for _, parameter in bucket.slices]) for each in tensors)
    message, own, owner = (nn.functional.pad(one, (0, size - len(one))) / group.size for one in joined)
    shard = slice(*place.shard(group.index))
    state = {"error": own, "error/owner": owner[shard].clone()}
    owner[shard] = 0
    own.add_(owner)  # 0, unless a load gave every replica the mean of all
    work = by.start(message, into=None, peers=ReducingRanks(bucket.world, axes, axes, (), shard, state, place)).work
    yield
    work.wait()
    owner.zero_()[shard] = state["error/owner"]
    for part, parameter in optimizer_slices(bucket):
        for each, flat, factor in zip(tensors, (message, own, owner), (1, group.size, group.size), strict=True):
            each[parameter].copy_(flat[part.start : part.stop]).mul_(factor)


def whole_tensors(values: SliceTensors, *, engine: DataParallel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of `values`; the caller's changes are written back to `values` (collectives).

    `values`: by slice, a tensor of the slice's shape. Every rank iterates to the end."""
    places = {piece.row.name: (bucket, piece) for bucket in engine.buckets for piece in bucket.place.pieces}

    def owned(bucket: Bucket) -> Tensor:
        return torch.cat([values[parameter] for _, parameter in bucket.slices])

    for row, gathered in engine.full_tensors(owned):
        full = gathered.clone()  # `gathered` may be a view of `values` or of other parameters
        yield row.name, full
        bucket, piece = places[row.name]
        stored = row.part(full, mesh=engine.world.mesh, rank=engine.world.rank).reshape(-1)
        for parameter, _, here, there in slice_pieces(bucket, within=(piece.start, piece.stop)):
            values[parameter][here] = stored[there]

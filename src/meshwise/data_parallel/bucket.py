"""Bucket: flat buffers with parameters of one unit, their gradients and masters, and the slice that this rank owns.

The `Reduction` (the ZeRO stage) decides which of these buffers a rank keeps in full and which only as its shard. Under
zero=3 the full parameters exist only while their unit is in use. `StorageConfig` names reduction, dtypes and tiers."""

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from meshwise.comm.api.world import Work, World, wait_all
from meshwise.data_parallel.bucket_layout import BucketPiece, BucketPlace, Options
from meshwise.data_parallel.gradient_reduction import ZERO, Codec, ReducedPart, ReducingRanks, Reduction
from meshwise.memory.chunked_update import UpdateChunk
from meshwise.memory.tiers import BorrowedTensor, Tiers
from meshwise.model.parameter_table import ParameterRow
from meshwise.precision.dtype_policy import Precision


@dataclass(frozen=True)
class StorageConfig:
    """Storage configuration of a plan: ZeRO stage, dtypes, tiers, and three kinds of axes whose ranks hold replicas."""

    reduction: Reduction = ZERO[0]
    precision: Precision = dataclasses.field(default_factory=Precision)
    tiers: Tiers = dataclasses.field(default_factory=Tiers)
    outer: tuple[str, ...] = ()
    """Axes whose ranks hold replicas of the same shards, summed in each step: under `dp=4x8`, the 4."""
    sync_axes: tuple[str, ...] = ()
    """Axes whose ranks hold replicas that differ between steps, as under `sync=local`; each saves its parameters."""
    nodes: tuple[str, ...] = ()
    """Under `hpz`, axes from node to node: each node has a second copy of the parameters, split over its ranks."""
    gather: Codec | None = None
    """Codec of gathered parameters; None: their dtype."""
    prefetch: int = 1
    """Under ZeRO-3, number of units that are gathered ahead of the one that runs."""
    overlap_gather: bool = False
    """Under ZeRO-1 and 2, True if updated parameters are awaited in the next forward, not in the step."""


class Bucket:
    """The parameters of one unit that share dtype, trainability and replica axes, in one flat buffer each for
    parameters, gradients and masters. A unit whose parameters differ in these has several buckets.

    | group      the ranks along `axes`, which share the parameters: each has a shard. Along `outer`, other groups hold
    |            replicas of the same shards, and the sums of the groups are added
    | whole      all elements; the model's parameters are views of it. Empty while a ZeRO-3 unit is not in use
    | shared     True if the ranks of a host hold one `whole` in shared memory: gather and publish then copy nothing
    | is_sharded True if only the shard exists between uses (ZeRO-3)
    | overlaps   True if the all-gather after an update overlaps with the next forward (`overlap_gather`)
    | second     under `hpz`, this rank's part of the second copy of `whole`; the ranks along `near`, of one node, have
    |            all of it
    | second_is_current   True from the gather that fills the second copy until the next update
    | codec      codec of gathered parameters; None: they travel in their dtype
    | kept       the elements that this rank stores between uses, from element `kept_from` of the bucket on
    | owned      (start, stop) of the elements that this rank updates: its `shard`, or all of them under zero=0
    | master     the owned elements in the dtype of the update: the parameters themselves if they have this dtype and
    |            are on this device; None if nothing in the bucket is trained
    | slices     (options, part of the master) for the optimizer; `chunks` the parts that are updated at once
    | frozen     for each piece, True while its parameter has `requires_grad` off: no update changes it or its state
    | gradient   accumulated gradients of this rank, all elements; `reduced` the sum over the ranks, owned elements
    | factor     gradients on disk are multiplied by it when they are read
    | local      True in a step that leaves each rank its own gradients, because the optimizer exchanges momenta.
    |            Then `reduced` is the gradient of this rank, and the step's norm the root of the ranks' mean square
    | sparse     indices of the pieces that got a sparse gradient in this step
    | counts     True if this rank counts the elements in norms and saves them; other ranks may hold copies"""

    second_is_current = has_master = local = False
    factor = 1.0

    def __init__(self, rows: Sequence[ParameterRow], *, world: World, storage: StorageConfig) -> None:
        self.world, self.storage = world, storage
        reduction, tiers = storage.reduction, storage.tiers
        summed = world.mesh.expand(rows[0].summed)
        self.axes = tuple(axis for axis in summed if axis not in storage.outer)
        self.outer = tuple(axis for axis in summed if axis in storage.outer)
        self.near = tuple(axis for axis in self.axes if axis not in storage.nodes)
        self.has_replicas = bool(self.outer) and world.group(self.outer).size > 1
        self.group = world.group(self.axes)
        shapes = {row.name: row.layout.local_shape(row.shape, mesh=world.mesh, rank=world.rank) for row in rows}
        self.place = BucketPlace.of(rows, shapes=shapes, parts=self.group.size, servers=reduction.servers)
        self.dtype = rows[0].dtype
        self._wire = self.storage.precision.reduction_of(self.dtype)
        self.trainable = rows[0].trainable
        self.frozen = [False] * len(rows)
        self.device = world.device
        copies = tuple(axis for axis in (*rows[0].copy_axes(world.mesh), *self.outer) if axis not in storage.sync_axes)
        self.counts = not rows[0].counted_elsewhere and all(world.group(axis).index == 0 for axis in copies)
        self.is_offloaded = tiers.is_offloaded("params")
        self.is_sharded = reduction.shards_parameters and (self.group.size > 1 or self.is_offloaded)
        self.overlaps = storage.overlap_gather and self.trainable and self.group.size > 1
        self.shard = self.place.shard(self.group.index)
        self.owned = self.shard if reduction.shards_updates else (0, self.place.size)
        # Tensors that other ranks read are allocated by the world: published slices, shards, gradients.
        common = None
        self.codec = storage.gather if self.dtype.is_floating_point and self.group.size > 1 else None
        if reduction.shards_updates and not (self.is_offloaded or reduction.servers) and self.codec is None:
            common = world.shared_empty(self.place.size, dtype=self.dtype, axes=self.axes)
        self.shared = common is not None
        if common is not None:
            self.whole, self.kept = common, common[slice(*self.shard)]
        elif self.is_sharded:
            self.whole = torch.empty(self.place.size, dtype=self.dtype, device=self.device)
            size = self.shard[1] - self.shard[0]
            here = None if self.is_offloaded else world.empty(size, dtype=self.dtype)
            self.kept = tiers.empty("params", numel=size, dtype=self.dtype) if here is None else here
        elif reduction.shards_updates:
            self.whole = self.kept = world.empty(self.place.size, dtype=self.dtype)
        else:
            self.whole = self.kept = torch.empty(self.place.size, dtype=self.dtype, device=self.device)
        self.kept_from = self.shard[0] if self.shared or self.is_sharded else 0
        self.second: Tensor | None = None
        if self.near != self.axes and self.is_sharded and not self.shared:
            self.second = world.empty(self.place.size // world.group(self.near).size, dtype=self.dtype)
        self._bytes = self.whole.untyped_storage().nbytes()
        self.free()
        self.gradient: Tensor | None = None
        self.reduced: Tensor | None = None
        self.master: Tensor | None = None
        self.slices: list[tuple[Options, nn.Parameter]] = []
        self.chunks: list[UpdateChunk] = []
        self.reduction_state: dict[str, Tensor] = {}
        self._square: Tensor | None = None
        self._loan: BorrowedTensor | None = None
        self._filled: set[int] = set()
        self.sparse: set[int] = set()
        self._views: list[Tensor] | None = None
        self._arriving: ReducedPart | None = None
        self._between: ReducedPart | None = None
        self._rounds = 0

    # ---- parameters --------------------------------------------------------------------------------------------

    @property
    def owned_parameters(self) -> Tensor:
        """The elements that this rank updates, in the dtype of the parameters."""
        return self.whole[slice(*self.owned)] if self.kept is self.whole else self.kept

    def fill(self, values: Iterable[Tensor]) -> None:
        """Store this rank's elements of `values`, the full parameters in piece order, taken one at a time."""
        mesh, rank = self.world.mesh, self.world.rank
        start, stop = self.kept_from, self.kept_from + self.kept.numel()
        self.kept.zero_()
        if self.trainable:
            self._make_master()
        for piece, value in zip(self.place.pieces, values, strict=True):
            if max(piece.start, start) < min(piece.stop, stop):
                part = piece.row.part(value.detach(), mesh=mesh, rank=rank).reshape(-1)
                _put(part, piece, into=self.kept, start=start)
                if self.has_master and self.master is not None:
                    _put(part, piece, into=self.master, start=self.owned[0])
        if self.shared:
            self.world.barrier(axes=self.axes)

    def _make_master(self) -> None:
        own, tiers = self.owned_parameters, self.storage.tiers
        wide = self.storage.precision.master_of(self.dtype)
        if wide == self.dtype and own.device.type == tiers.updates_on.type:
            self.master = own
        elif tiers.is_offloaded("masters"):
            self.master = tiers.empty("masters", numel=own.numel(), dtype=wide).zero_()
        else:
            self.master = torch.zeros_like(own, dtype=wide)
        self.has_master = self.master is not own
        if tiers.is_offloaded("gradients"):
            self.reduced = tiers.empty("gradients", numel=own.numel(), dtype=wide).zero_()
        elif self.storage.reduction.shards_gradients:
            empty = self.world.empty if self.has_replicas else partial(torch.empty, device=self.device)
            self.reduced = empty(own.numel(), dtype=wide).zero_()
        (start, stop), most = self.owned, tiers.chunk_limit or max(1, own.numel())
        self.chunks = [self._chunk(low, high=min(low + most, stop)) for low in range(start, stop, most)]
        reduction, wide_sum = self.storage.reduction, self.storage.precision.accumulation_of(self.dtype)
        kept = {name: (own.numel(), wide) for name in reduction.owned_state}
        kept |= dict.fromkeys(reduction.summed_state, (self.place.size, wide_sum))
        kept |= {f"{name}/owner": (self.shard[1] - self.shard[0], wide_sum) for name in reduction.owner_state}
        for name, (size, dtype) in kept.items():
            away = name in reduction.owned_state and name != "outer_error" and tiers.is_offloaded("outer")
            new = partial(tiers.empty, "outer", numel=size) if away else partial(torch.empty, size, device=self.device)
            self.reduction_state[name] = new(dtype=dtype).zero_()

    def _chunk(self, low: int, *, high: int) -> UpdateChunk:
        """Return elements [low, high) as one chunk to update, and add their slices, one for each run, to `slices`."""
        assert self.master is not None
        first = self.owned[0]
        runs = [(options, max(low, start), min(high, stop)) for options, start, stop in self.place.runs]
        added = [(o, nn.Parameter(self.master[a - first : b - first])) for o, a, b in runs if a < b]
        self.slices += added
        here = slice(low - first, high - first)
        narrow = self.owned_parameters[here] if self.has_master else None
        gradient, factor = lambda: self.reduced_gradient[here], lambda: self.factor
        return UpdateChunk([part for _, part in added], self.master[here], narrow, gradient, factor)

    def cut(self, labels: Sequence[Hashable]) -> dict[nn.Parameter, list[nn.Parameter]]:
        """Cut slices where neighbouring pieces differ in their label or in `frozen`; return the parts of cut slices.

        So all elements of a slice have been updated in the same steps, and share numbers such as a count of steps.
        Frozen slices have `requires_grad` off."""
        pieces, marks = self.place.pieces, list(zip(labels, self.frozen, strict=True))
        borders = [after.start for n, after in enumerate(pieces) if n and marks[n - 1] != marks[n]]
        off = [piece for piece, frozen in zip(pieces, self.frozen, strict=True) if frozen]
        parts, slices, start = dict[nn.Parameter, list[nn.Parameter]](), [], self.owned[0]
        for options, whole in self.slices:
            stop = start + whole.numel()
            ends = sorted({start, *(border for border in borders if start < border < stop), stop})
            if len(ends) > 2:
                sizes = [high - low for low, high in pairwise(ends)]
                parts[whole] = [nn.Parameter(part) for part in whole.detach().split(sizes)]
            for low, part in zip(ends, parts.get(whole, [whole]), strict=False):
                slices.append((options, part))
                part.requires_grad_(not any(piece.start <= low < piece.stop for piece in off))
            start = stop
        self.slices = slices
        for chunk in self.chunks:
            chunk.slices[:] = [part for whole in chunk.slices for part in parts.get(whole, (whole,))]
        return parts

    def views(self, flat: Tensor | None = None) -> list[Tensor]:
        """Return this rank's tensors of the parameters, in piece order, as views of `flat`, (elements,), or `whole`."""
        flat = self.whole if flat is None else flat
        return [flat[piece.start : piece.stop].view(piece.shape) for piece in self.place.pieces]

    def gather(self, *, exact: bool = False) -> Work:
        """Start to gather `whole` from the shards (a collective); a shared buffer needs none.

        exact: gather the stored values, without the codec of the plan."""
        if self.shared:
            return Work()
        self.world.streams.resize(self.whole, size=self._bytes)
        if self.second is not None and self.second_is_current and not exact:
            return self.world.all_gather(self.second, into=self.whole, axes=self.near)
        kept, codec, wide = self.fetch_shard().wait(), self.codec, torch.promote_types(self.dtype, torch.float32)
        if codec is None or exact:
            sent = self.world.all_gather(kept, into=self.whole, axes=self.axes)
        else:
            packed = codec.encode(kept.to(wide).view(1, -1))
            received = packed.new_empty(self.group.size, packed.shape[1])
            sent = self.world.all_gather(packed, into=received, axes=self.axes)
        if exact or (codec is None and self.second is None):
            return sent

        def finish() -> None:
            sent.wait()
            if codec is not None:
                self.whole.copy_(codec.decode(received, elements=kept.numel(), dtype=wide).view(-1))
            if self.second is not None:
                size = self.second.numel()
                self.second.copy_(self.whole[size * self.world.group(self.near).index :][:size])
                self.second_is_current = True

        return Work(finish=finish)

    def fetch_shard(self) -> BorrowedTensor:
        """Start to copy the shard from its tier to the device, unless that has started."""
        if self._loan is None:
            self._loan = self.storage.tiers.bring(self.kept)
        return self._loan

    def release_shard(self) -> None:
        """Release the device copy of a shard from another tier, after its gather or if no gather needs it."""
        if self._loan is not None:
            self._loan.release()
            self._loan = None

    def free(self) -> None:
        """Free the memory of `whole` under ZeRO-3; its views are valid again after the next gather."""
        if self.is_sharded and not self.shared:
            self.world.streams.resize(self.whole, size=0)

    def publish(self) -> Work:
        """Start to send the updated parameters to the other ranks; does nothing if they gather before each use."""
        self.second_is_current = False
        reduction = self.storage.reduction
        if self.shared or (reduction.shards_updates and not reduction.shards_parameters):
            into = self.peers.parts(self.whole) if reduction.servers else self.whole
            return self.world.all_gather(self.owned_parameters, into=into, axes=self.axes)
        return Work()

    def round_off(self) -> None:
        """Copy the masters into the parameters, rounded to their dtype."""
        if self.has_master and self.master is not None:
            self.owned_parameters.copy_(self.master)

    # ---- gradients ---------------------------------------------------------------------------------------------

    @property
    def reduced_gradient(self) -> Tensor:
        """The tensor `reduced`, which exists after a reduction."""
        assert self.reduced is not None
        return self.reduced

    def begin_step(self) -> None:
        """Discard the gradients of the last step, and wait for a reduction of a step that raised."""
        wait_all(part.work for part in (self._arriving, self._between) if part is not None)
        self._arriving = self._between = None
        self._filled.clear()
        self.sparse.clear()
        self._rounds = 0
        if not (self.storage.reduction.shards_gradients or self.storage.tiers.is_offloaded("gradients")):
            self.reduced = None

    def deposit(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients, one per piece in piece order (None: no gradient), to the accumulated gradients."""
        views = self._gradient_views()
        given = [(index, gradient) for index, gradient in enumerate(gradients) if gradient is not None]
        self.sparse.update(index for index, gradient in given if gradient.layout is not torch.strided)
        first = [(index, gradient) for index, gradient in given if index not in self._filled]
        if first:
            torch._foreach_copy_([views[index] for index, _ in first], [_dense(gradient) for _, gradient in first])
        if len(first) < len(given):
            again = [(index, gradient) for index, gradient in given if index in self._filled]
            torch._foreach_add_([views[index] for index, _ in again], [_dense(gradient) for _, gradient in again])
        self._filled.update(dict(first))

    def accumulated(self, index: int) -> Tensor:
        """Return the accumulated gradient of piece number `index` as a writable view; zeros if there is none."""
        view = self._gradient_views()[index]
        if index not in self._filled:
            view.zero_()
            self._filled.add(index)
        return view

    def accumulated_views(self) -> Sequence[Tensor | None]:
        """Return the accumulated gradients in piece order; None where there is none yet, or in another dtype.

        On meta all are None: rehearsals and bounds count the sum of a unit's gradients as one operation."""
        if self.gradient is None or self.gradient.is_meta or self.gradient.dtype != self.dtype:
            return [None] * len(self.place.pieces)
        return [view if index in self._filled else None for index, view in enumerate(self._gradient_views())]

    def _gradient_views(self) -> list[Tensor]:
        buffer = self._buffer()
        if self._views is None:
            self._views = self.views(buffer)
        return self._views

    def _buffer(self) -> Tensor:
        if self.gradient is None:
            dtype = self.storage.precision.accumulation_of(self.dtype)
            self.gradient, self._views = self.world.empty(self.place.size, dtype=dtype), None
            for gap in self.place.padding:
                self.gradient[slice(*gap)].zero_()  # the norm includes the padding
        return self.gradient

    def start_reduce(self) -> None:
        """Start to sum the gradients over the group; `settle` waits. Parameters without a gradient count as zero."""
        buffer = self._buffer()
        if len(self._filled) < len(self.place.pieces):
            for index in range(len(self.place.pieces)):
                self.accumulated(index)
        if self.local and not self.outer:
            self._arriving = ReducedPart(Work(), buffer)
            return
        reduction, wire, into = self.storage.reduction, buffer, None
        if self.group.size > 1 and self._wire != buffer.dtype and not reduction.keeps_own_gradients:
            wire = self.world.empty(buffer.numel(), dtype=self._wire).copy_(buffer)
        if reduction.shards_gradients:
            into = self.reduced_gradient
            if self._rounds or into.dtype != wire.dtype or self.storage.tiers.is_offloaded("gradients"):
                into = wire.new_empty(into.numel())
            self._filled.clear()
        self._arriving = reduction.start(wire, into=into, peers=self.peers)
        self._rounds += 1

    @property
    def peers(self) -> ReducingRanks:
        """The ranks of a reduction, with the shard and the state of this rank."""
        axes, shard = (self.axes, self.near, self.outer), slice(*self.shard)
        return ReducingRanks(self.world, *axes, shard, self.reduction_state, self.place)

    def settle(self) -> None:
        """Wait for the started reduction and add its result to `reduced`; do nothing if none has started."""
        if self._arriving is None:
            return
        arriving, self._arriving = self._arriving, None
        arriving.work.wait()
        self.factor = 1.0
        self._square = None
        if self.storage.tiers.is_offloaded("gradients"):
            self._store_reduced(self._updating(arriving.values))
        elif not self.storage.reduction.shards_gradients:
            self.reduced = self._updating(arriving.values)
        else:
            if self._rounds > 1:
                self.reduced_gradient.add_(arriving.values)
            elif arriving.values is not self.reduced:
                self.reduced_gradient.copy_(arriving.values)
            self.gradient = self._views = None

    def start_replicas(self) -> None:
        """Start to add the `reduced` gradients of the replicas, in the wire dtype; once a step, after `settle`."""
        if not self.has_replicas or self.local:
            return
        tiers = self.storage.tiers
        wire = self.reduced_gradient
        if tiers.is_offloaded("gradients"):
            tiers.settle()
            loan = tiers.bring(wire)
            wire = loan.wait().to(self._wire, copy=True)
            loan.release()
        elif wire.dtype != self._wire:
            wire = self.world.empty(wire.numel(), dtype=self._wire).copy_(wire)
        self._between = self.storage.reduction.start_replicas(wire, peers=self.peers)

    def settle_replicas(self) -> None:
        """Wait for the sum of the replicas, and put it into `reduced`; do nothing if none."""
        if self._between is None:
            return
        between, self._between = self._between, None
        between.work.wait()
        self._square = None
        if self.storage.tiers.is_offloaded("gradients"):
            self._rounds = 1
            self._store_reduced(between.values.to(self.reduced_gradient.dtype))
        elif between.values is not self.reduced:
            self.reduced_gradient.copy_(between.values)

    def _updating(self, arrived: Tensor) -> Tensor:
        """Return reduced gradients in the dtype of the masters, in the accumulation buffer if it has this dtype."""
        assert self.master is not None
        assert self.gradient is not None
        if arrived.dtype == self.master.dtype:
            return arrived
        if self.gradient.dtype == self.master.dtype:
            return self.gradient[slice(*self.owned)].copy_(arrived)
        return arrived.to(self.master.dtype)

    def _store_reduced(self, arrived: Tensor) -> None:
        """Add the gradients of earlier micro-batches, compute the norm, and move the sum to its tier."""
        tiers = self.storage.tiers
        if self._rounds > 1:
            tiers.settle()
            before = tiers.bring(self.reduced_gradient)
            arrived = before.wait() + arrived
            before.release()
        self._square = _square(self._counted(arrived))
        tiers.store(arrived, into=self.reduced_gradient)
        self.gradient = self._views = None

    def squared_norm(self) -> Tensor:
        """Return this rank's part of the squared norm of the reduced gradient: an fp64 scalar, cached."""
        if self._square is None:
            size = self.world.group(self.outer or self.axes).size if self.local else 1
            self._square = _square(self._counted(self.reduced_gradient)) * size
        return self._square

    def gradient_for_norm(self) -> Tensor | None:
        """Return the reduced gradient that this rank counts in the norm, or None if its squared norm is known."""
        return self._counted(self.reduced_gradient) if self._square is None and not self.local else None

    def forget_norm(self) -> None:
        """Discard the cached norm, because the reduced gradient has changed."""
        self._square = None

    def gradients_to_scale(self, factor: float) -> list[Tensor]:
        """Return the reduced gradient to multiply by `factor` now, or [] and set `self.factor` if it is on disk."""
        self.forget_norm()
        if self.reduced is None:
            return []
        if not self.storage.tiers.on_disk(self.reduced):
            return [self.reduced]
        self.factor = factor
        return []

    def _counted(self, reduced: Tensor) -> Tensor:
        shard = reduced if self.storage.reduction.shards_updates or self.local else reduced[slice(*self.shard)]
        alone = self.local or not self.outer or self.world.group(self.outer).index == 0  # else the first replica counts
        return shard if self.counts and alone else shard[:0]

    def gradient_slices(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Return (optimizer's parameter, view of its part of the reduced gradient) of each slice; see `forget_norm`.

        The gradients must not be on another tier."""
        parameters = [parameter for _, parameter in self.slices]
        return zip(parameters, self.reduced_gradient.split([each.numel() for each in parameters]), strict=True)

    def owned_gradient(self) -> Tensor:
        """Return the reduced gradient of the elements that this rank updates, (elements,); sum `local` ones now."""
        if self.local:
            total = self.reduced_gradient.clone()
            self.world.all_reduce(total, axes=self.outer or self.axes).wait()
            return total[slice(*self.owned)]
        reduced = self.reduced_gradient.to(self.device)
        return reduced if self.factor == 1.0 else reduced * self.factor

    def gathered_from(self, owned: Tensor) -> Tensor:
        """Return values of all elements of the bucket, from the `owned` values of each rank (a collective)."""
        return self._gathered_shards(owned) if self.storage.reduction.shards_updates else owned

    def _gathered_shards(self, shard: Tensor) -> Tensor:
        whole = shard.new_empty(self.place.size)
        into = self.peers.parts(whole) if self.place.ranks_without_shard else whole
        self.world.all_gather(shard.contiguous(), into=into, axes=self.axes).wait()
        return whole

    def summed_shard(self, name: str) -> Tensor:
        """Return this rank's shard of the `summed_state` called `name`, summed over ranks and replicas (collective)."""
        total = self.reduction_state[name].clone()
        shard = total[slice(*self.shard)]
        self.world.reduce_scatter(total, into=shard, axes=self.axes).wait()
        if self.has_replicas:
            self.world.all_reduce(shard, axes=self.outer).wait()
        own = self.reduction_state.get(f"{name}/owner")
        return shard if own is None else shard + own

    def summed_state(self, name: str) -> Tensor:
        """Return the sum over the ranks of the `summed_state` called `name`, owned elements (a collective)."""
        shard = self.summed_shard(name)
        return shard if self.storage.reduction.shards_updates else self._gathered_shards(shard)

    # ---- dtypes and bytes --------------------------------------------------------------------------------------

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return dtypes by kind: parameters; if trainable also master, optimizer_state, reduction, accumulation."""
        found = {"parameters": self.whole.dtype}
        if self.master is not None:
            precision, gradient = self.storage.precision, self.gradient
            found["master"] = self.master.dtype
            found["optimizer_state"] = precision.master_of(self.dtype)
            found["reduction"] = self._wire
            found["accumulation"] = precision.accumulation_of(self.dtype) if gradient is None else gradient.dtype
        return found

    @property
    def gathered(self) -> int:
        """Bytes of `whole` while its unit is gathered; 0 if free, shared, or not sharded."""
        return self.whole.untyped_storage().nbytes() if self.is_sharded and not self.shared else 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (category, tensor) of each stored tensor; categories: parameters, gradients, reduction."""
        yield "parameters", self.kept
        if self.second is not None:
            yield "parameters", self.second
        if self.has_master and self.master is not None:
            yield "parameters", self.master
        held = (x for x in (self.reduced, self.gradient) if x is not None)
        for gradient in {x.untyped_storage().data_ptr(): x for x in held}.values():  # each memory once
            yield "gradients", gradient
        for state in self.reduction_state.values():
            yield "reduction", state


def _put(part: Tensor, piece: BucketPiece, *, into: Tensor, start: int) -> None:
    """Copy into `into`, elements [start, start + its size) of the bucket, the elements of a piece that lie there."""
    low, high = max(piece.start, start), min(piece.stop, start + into.numel())
    if low < high:
        into[low - start : high - start].copy_(part[low - piece.start : high - piece.start])


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _square(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values)
    return norm.double().square()

"""Describe the stored tensors of a rank as rectangles of logical tensors, for checkpoints.

A rank stores flat slices of buckets. ZeRO cuts them at any element, and tensor parallelism may have cut the tensors
before. A checkpoint sees only rectangles, such as rows 3 to 7 of `head.weight`.

    | bucket           | a.weight        | b.weight | b.bias | pad |
    | shard of rank 1        |<-------------------->|
    | stored slices          | a.weight   | b.weight|                   a matrix gives up to three rectangles each

The slot of a tensor is its kind, for some kinds with a key after a slash (`optimizer/exp_avg`). docs/checkpoints.md has
a table of all kinds, before the name of the parameter. A complex tensor is stored as `torch.view_as_real` shows it.

A checkpoint also fills optimizer state that does not exist yet. The parameters exist before a load, but the optimizer's
state only after its first step. It is created slice by slice from the index: a rank allocates what its plan needs."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import map_tensors
from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_layout import BucketPiece, Options
from meshwise.data_parallel.stage_engines import Engine
from meshwise.layout.layout import Rectangle, rectangles
from meshwise.memory.chunked_update import ChunkedUpdate


@dataclass(frozen=True)
class StoredSlice:
    """A rectangle of a logical tensor, and this rank's tensor that stores its elements.

    | name     name of the parameter or buffer
    | slot     kind of the tensor, see docs/checkpoints.md
    | shape    full shape of the logical tensor
    | tensor   the elements of the rectangle, in its shape: a view, so writing to it changes the stored values
    | stable   True if only an optimizer step changes the tensor"""

    name: str
    slot: str
    shape: tuple[int, ...]
    rectangle: Rectangle
    tensor: Tensor
    stable: bool = True

    @property
    def key(self) -> str:
        """Name of the logical tensor in a checkpoint: `slot/name`."""
        return f"{self.slot}/{self.name}"

    @classmethod
    def of_full(cls, tensor: Tensor, *, name: str, slot: str, stable: bool = True) -> "StoredSlice":
        """Return a slice that covers all of `tensor`."""
        shape = tuple(tensor.shape)
        return cls(name, slot, shape, Rectangle((0,) * len(shape), shape), tensor, stable).as_real()

    def as_real(self) -> "StoredSlice":
        """Return the slice with a complex tensor viewed as real (last dim 2); a real slice is returned unchanged."""
        if not self.tensor.is_complex():
            return self
        wide = Rectangle((*self.rectangle.offsets, 0), (*self.rectangle.sizes, 2))
        return StoredSlice(self.name, self.slot, (*self.shape, 2), wide, torch.view_as_real(self.tensor), self.stable)


@dataclass(frozen=True)
class BucketSlice:
    """Values for consecutive elements of a bucket: `values[0]` belongs to element `start` of the bucket."""

    bucket: Bucket
    start: int
    values: Tensor

    @property
    def stop(self) -> int:
        """Index in the bucket of the element after the last one."""
        return self.start + self.values.numel()

    def slices_of(self, piece: BucketPiece, *, slot: str, within: tuple[int, int]) -> Iterator[StoredSlice]:
        """Yield those elements of a parameter that lie both in this slice and in `within`, as slices of `slot`.

        within: (start, stop) of elements of the bucket."""
        low = max(self.start, within[0], piece.start)
        high = min(self.stop, within[1], piece.stop)
        if low >= high:
            return
        flat = self.values[low - self.start : high - self.start]
        for local in rectangles(piece.shape, start=low - piece.start, stop=high - piece.start):
            block, flat = flat[: local.numel].view(local.sizes), flat[local.numel :]
            for rectangle, inside in self._sections(piece, local):
                yield StoredSlice(piece.row.name, slot, piece.row.shape, rectangle, block[inside.slices]).as_real()

    def _sections(self, piece: BucketPiece, local: Rectangle) -> Iterator[tuple[Rectangle, Rectangle]]:
        """Yield (rectangle of the full tensor, its place in `local`) for each part of `local`.

        local: a rectangle of this rank's tensor; it may contain several sections of the full tensor."""
        world, row = self.bucket.world, piece.row
        beside = 0
        for section in row.layout.pieces(row.shape, mesh=world.mesh, rank=world.rank):
            origin = tuple(beside if dim == row.layout.section_dim else 0 for dim in range(len(row.shape)))
            if common := local.overlap(Rectangle(origin, section.sizes)):
                offsets = tuple(map(int.__add__, common.seen_from(origin).offsets, section.offsets))
                yield Rectangle(offsets, common.sizes), common.seen_from(local.offsets)
            beside += section.sizes[row.layout.section_dim] if row.shape else 0


def slices_to_save(engine: Engine, *, optimizer: torch.optim.Optimizer) -> Iterator[StoredSlice]:
    """Yield the slices that this rank saves; all ranks together save each element of each logical tensor once.

    Every rank calls it and iterates to the end, because state of a reduction may need a collective.

    Raises ValueError for optimizer state that is neither a number nor of its parameter's shape."""
    for unit in engine.units:
        for bucket in unit.buckets:
            if bucket.counts:
                for piece in bucket.place.pieces:
                    yield from _owned(bucket, piece, optimizer)
            if bucket.counts or bucket.has_replicas:
                yield from [part for part in _reduction_state(bucket) if bucket.counts]
    for key, row in engine.owned.items():
        if not row.counted_elsewhere:
            yield from _whole_state(row.name, optimizer.state.get(key, {}))
    # Several stages may hold copies of one buffer.
    yield from {held.name: held for held in buffers(engine.modules) if engine.saves(held.name)}.values()


def buffers(modules: Iterable[nn.Module]) -> Iterator[StoredSlice]:
    """Yield the persistent buffers of `modules`, in full. A buffer with several names comes once, under the first."""
    seen: set[int] = set()
    for path, owner in (named for module in modules for named in module.named_modules()):
        for key, buffer in owner.named_buffers(recurse=False):
            # torch's public way to persistent buffers is `state_dict`, which a ZeRO-3 model refuses.
            if key not in owner._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield StoredSlice.of_full(buffer, name=f"{path}.{key}" if path else key, slot="buffer", stable=False)


def values_to_load(bucket: Bucket) -> BucketSlice:
    """Return the values that a load must fill: the master if trainable, else the kept parameters."""
    if bucket.master is not None:
        return BucketSlice(bucket, bucket.owned[0], bucket.master)
    return BucketSlice(bucket, bucket.kept_from, bucket.kept)


def optimizer_slices(bucket: Bucket) -> Iterator[tuple[BucketSlice, nn.Parameter]]:
    """Yield (slice of the bucket, optimizer's parameter) for each parameter that the optimizer updates."""
    start = bucket.owned[0]
    for _, parameter in bucket.slices:
        yield BucketSlice(bucket, start, parameter.detach()), parameter
        start += parameter.numel()


def slice_pieces(
    bucket: Bucket, *, within: tuple[int, int] | None = None
) -> Iterator[tuple[nn.Parameter, BucketPiece, slice, slice]]:
    """Yield (optimizer's parameter, piece, elements of the parameter, elements of the piece) where the two overlap.

    within: (start, stop) of the elements of the bucket to look at; None: all."""
    start, stop = within or (0, bucket.place.size)
    for part, parameter in optimizer_slices(bucket):
        for piece in bucket.place.pieces:
            low, high = max(part.start, piece.start, start), min(part.stop, piece.stop, stop)
            if low < high:
                here = slice(low - part.start, high - part.start)
                yield parameter, piece, here, slice(low - piece.start, high - piece.start)


def _owned(bucket: Bucket, piece: BucketPiece, optimizer: torch.optim.Optimizer) -> Iterator[StoredSlice]:
    """Yield the slices of one parameter and of its optimizer state that this rank saves."""
    if not piece.row.numel and bucket.group.index == 0:
        empty = torch.empty(piece.row.shape, dtype=piece.row.dtype)
        yield StoredSlice.of_full(empty, name=piece.row.name, slot="parameter")
    yield from values_to_load(bucket).slices_of(piece, slot="parameter", within=bucket.shard)
    for part, parameter in optimizer_slices(bucket):
        held = part.slices_of(piece, slot="parameter", within=bucket.shard)
        has_first = any(not any(one.rectangle.offsets) for one in held)  # one rank has it, and saves the scalars
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                flat = BucketSlice(bucket, part.start, value)
                yield from flat.slices_of(piece, slot=f"optimizer/{key}", within=bucket.shard)
            elif value is not None and has_first:
                slot, number = number_slot(value, key=key, name=piece.row.name)
                yield StoredSlice.of_full(number, name=piece.row.name, slot=slot)


def _reduction_state(bucket: Bucket) -> Iterator[StoredSlice]:
    """Yield the reduction's state that this rank saves; `summed_state` is summed over the ranks (a collective)."""
    reduction, state = bucket.storage.reduction, bucket.reduction_state
    kept = {name: BucketSlice(bucket, bucket.owned[0], state[name]) for name in state if name in reduction.owned_state}
    summed = [name for name in state if name in reduction.summed_state]
    kept |= {name: BucketSlice(bucket, bucket.shard[0], bucket.summed_shard(name)) for name in summed}
    for name, values in kept.items():
        for piece in bucket.place.pieces:
            for part in values.slices_of(piece, slot=f"reduction/{name}", within=bucket.shard):
                yield dataclasses.replace(part, stable=False)  # it changes in the backward


def _whole_state(name: str, state: Mapping[str, Any]) -> Iterator[StoredSlice]:
    """Yield the state of one parameter, of any structure. Raises ValueError for a value that JSON cannot hold."""
    found: dict[str, Tensor] = {}

    def stored(tensor: Tensor) -> Mapping[str, str]:
        found[slot := f"{WHOLE}/{len(found)}"] = tensor.detach()
        return {_TENSOR: slot}

    try:
        text = json.dumps(map_tensors(stored, state))
    except TypeError as error:
        raise ValueError(f"the optimizer's state of {name} cannot be saved: {error}") from error
    found[_LAYOUT] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    for slot, tensor in found.items():
        yield StoredSlice.of_full(tensor, name=name, slot=slot)


def _structured(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state of one parameter from the tensors of `_whole_state`, by slot."""
    text = bytes(tensors[_LAYOUT].tolist())
    return json.loads(text, object_hook=lambda it: tensors[it[_TENSOR]] if _TENSOR in it else it)  # type: ignore[no-any-return]


def number_slot(value: Any, *, key: str, name: str) -> tuple[str, Tensor]:
    """Return (slot, scalar tensor) of optimizer state that is one number. Raises ValueError for any other state."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return f"scalar/{key}", value.detach().reshape(())
    if isinstance(value, bool | int | float):
        return f"number/{key}", torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
    raise ValueError(
        f"the optimizer's {key!r} for {name} is of {what}; a checkpoint stores numbers and tensors of the shape of the "
        "parameter"
    )


@dataclass(frozen=True)
class SavedTensorSpec:
    """Dtype and full shape of one tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Slots: TypeAlias = Mapping[str, SavedTensorSpec]
"""Saved tensors of one parameter, by slot: `parameter`, `optimizer/exp_avg`, `scalar/step`, `reduction/error`."""

OPTIMIZER_KINDS = ("optimizer", "scalar", "number")
"""Kinds of optimizer state, the first words of their slots: tensors, one-element tensors, Python numbers."""
WHOLE = "whole"
"""Kind of the optimizer state of parameters that one rank computes whole."""
_LAYOUT = f"{WHOLE}/layout"
_TENSOR = "tensor of meshwise"
"""Key of an object of the layout in place of a tensor; its value is the slot of the tensor."""


class CheckpointRefill:
    """One load of a checkpoint: the caller fills the tensors of `needed`; then `finish` sets the optimizer's state."""

    def __init__(self, engine: Engine, *, update: ChunkedUpdate, slots: Mapping[str, Slots]) -> None:
        """Check that the checkpoint fits the model; change nothing.

        slots: the saved tensors, by parameter name.

        Raises ValueError if a parameter is missing, unknown or of another shape."""
        self._engine = engine
        self._update = update
        self._optimizer = update.optimizer
        self._slots = slots
        self._numbers: dict[str, dict[str, Tensor]] = {}
        self._states: list[tuple[nn.Parameter, dict[str, Any]]] = []
        if unknown := sorted(slots.keys() - {row.name for row in engine.table.rows}):
            raise ValueError(f"the checkpoint has parameters that the model has not: {_some(unknown)}")
        if missing := [row.name for row in engine.table.rows if "parameter" not in slots.get(row.name, {})]:
            raise ValueError(f"the checkpoint lacks parameters that the model has: {_some(missing)}")
        for row in engine.table.rows:
            found = slots[row.name]["parameter"].shape
            wanted = (*row.shape, *((2,) if row.dtype.is_complex else ()))
            if found != wanted:
                raise ValueError(f"{row.name} has the shape {found} in the checkpoint and {wanted} in the model")
        trained = [row for row in engine.table.rows if row.trainable and row.numel]
        self._first_with = {row.options: [row.name] for row in reversed(trained)}

    def needed(self) -> Iterator[StoredSlice]:
        """Yield every slice that the caller must fill on this rank; other ranks may store the same elements.

        Sets the reduction's state to zero. Optimizer tensors of the right shape and dtype are filled in place."""
        for bucket in (bucket for unit in self._engine.units for bucket in unit.buckets):
            here = values_to_load(bucket)
            for piece in bucket.place.pieces:
                yield from here.slices_of(piece, slot="parameter", within=(here.start, here.stop))
            for (part, parameter), (options, _) in zip(optimizer_slices(bucket), bucket.slices, strict=True):
                yield from self._state(part, parameter, names=self._names(part, options))
            yield from self._reduction_state(bucket)
        for key, row in self._engine.owned.items():
            yield from self._whole_state(key, row.name)
        yield from buffers(self._engine.modules)

    def finish(self) -> None:
        """Replace the optimizer's state by the loaded state. Call it when all slices of `needed` are filled.

        Slices are cut between parameters that were saved with different state, as when some were frozen for a time."""
        state_of = self._optimizer.state
        for parameter, state in self._states:
            state_of.pop(parameter, None)
            if state:
                state_of[parameter] = _structured(state) if _LAYOUT in state else state
        for bucket in self._engine.buckets:
            labels = [
                (self._state_slots(name), {slot: one.item() for slot, one in self._numbers.get(name, {}).items()})
                for name in (piece.row.name for piece in bucket.place.pieces)
            ]
            self._update.cut(bucket.cut(labels))
            for (part, parameter), (options, _) in zip(optimizer_slices(bucket), bucket.slices, strict=True):
                self._finish_slice(parameter, names=self._names(part, options))
        self._engine.cuts += 1
        self._numbers, self._states = {}, []

    def _finish_slice(self, parameter: nn.Parameter, *, names: Sequence[str]) -> None:
        """Set the numbers in a slice's state, and remove state that was not saved for the slice's parameters."""
        slots = self._state_slots(names[0]) if names else ()
        loaded, state = self._optimizer.state.pop(parameter, {}), dict[str, Any]()
        for kind, _, key in (slot.partition("/") for slot in slots):
            number = self._numbers[names[0]].get(f"{kind}/{key}") if kind != "optimizer" else None
            if number is None:
                state[key] = loaded[key]
            else:
                state[key] = number.item() if kind == "number" else number.clone().to(self._number_device(parameter))
        if state:
            self._optimizer.state[parameter] = state

    def _whole_state(self, key: nn.Parameter, name: str) -> Iterator[StoredSlice]:
        """Create the tensors of a whole parameter's state, and yield the slices to fill."""
        slots, tensors = self._slots[name], dict[str, Tensor]()
        for slot, saved in slots.items():
            if slot.startswith(f"{WHOLE}/"):
                dtype = key.dtype if saved.shape and saved.dtype == slots["parameter"].dtype else saved.dtype
                # torch keeps scalar state, such as counts of steps, on the CPU too
                on = key.device if saved.shape and slot != _LAYOUT else torch.device("cpu")
                tensors[slot] = torch.empty(saved.shape, dtype=dtype, device=on)
                yield StoredSlice.of_full(tensors[slot], name=name, slot=slot)
        self._states.append((key, tensors))

    def _state_slots(self, name: str) -> tuple[str, ...]:
        """Return the slots of the optimizer's state that was saved for a parameter."""
        return tuple(sorted(slot for slot in self._slots[name] if slot.partition("/")[0] in OPTIMIZER_KINDS))

    def _names(self, part: BucketSlice, options: Options) -> list[str]:
        """Return the parameters with elements in a slice; for padding alone, any parameter with its options."""
        pieces = part.bucket.place.pieces
        own = [one.row.name for one in pieces if max(one.start, part.start) < min(one.stop, part.stop)]
        return own or self._first_with.get(options, [])

    def _reduction_state(self, bucket: Bucket) -> Iterator[StoredSlice]:
        """Set the reduction's state to zero, and yield the slices of it that the checkpoint has.

        A saved `summed_state` is a sum over ranks. So each rank of the first replica loads only its shard, and has
        zeros elsewhere. State that is not saved is removed."""
        reduction = bucket.storage.reduction
        names = (*reduction.owned_state, *reduction.summed_state)
        for name in [name for name in bucket.reduction_state if name.partition("/")[0] not in names]:
            del bucket.reduction_state[name]
        for name, values in bucket.reduction_state.items():
            values.fill_(float("nan") if name == "agreed" else 0.0)  # `Replicas.load_state` replaces NaN
            start, stop = bucket.owned if name in reduction.owned_state else bucket.shard
            if name not in reduction.owned_state and bucket.has_replicas and bucket.world.group(bucket.outer).index:
                continue
            for piece in bucket.place.pieces:
                if f"reduction/{name}" in self._slots[piece.row.name]:
                    whole = BucketSlice(bucket, start if values.numel() == stop - start else 0, values)
                    yield from whole.slices_of(piece, slot=f"reduction/{name}", within=(start, stop))

    def _state(self, part: BucketSlice, parameter: nn.Parameter, *, names: Sequence[str]) -> Iterator[StoredSlice]:
        """Create the optimizer's state of one slice, and yield the slices to fill."""
        old, new = self._optimizer.state.get(parameter, {}), dict[str, Any]()
        pieces = {one.row.name: one for one in part.bucket.place.pieces}
        for name in names:
            for slot in self._state_slots(name):
                kind, _, key = slot.partition("/")
                if kind == "optimizer":
                    if key not in new:
                        new[key] = self._like(parameter, self._slots[name], slot=slot, old=old.get(key))
                    values = BucketSlice(part.bucket, part.start, new[key])
                    if name in pieces:
                        yield from values.slices_of(pieces[name], slot=slot, within=(part.start, part.stop))
                elif slot not in self._numbers.setdefault(name, {}):
                    number = self._numbers[name][slot] = torch.zeros((), dtype=self._slots[name][slot].dtype)
                    yield StoredSlice.of_full(number, name=name, slot=slot)
        self._states.append((parameter, new))

    def _like(self, parameter: nn.Parameter, slots: Slots, *, slot: str, old: object) -> Tensor:
        """Return the tensor for one state of a slice: `old` if it has the right shape and dtype, else a new one.

        State that was saved in its parameter's dtype gets the dtype that the parameter has now."""
        dtype = parameter.dtype if slots[slot] == slots["parameter"] else slots[slot].dtype
        if isinstance(old, Tensor) and old.shape == parameter.shape and old.dtype == dtype:
            return old
        return self._update.zero_state(parameter, key=slot.partition("/")[2], dtype=dtype)

    def _number_device(self, parameter: nn.Parameter) -> torch.device:
        """Return the device of a parameter's scalar state: the parameter's if fused or capturable, else the CPU."""
        groups = self._optimizer.param_groups
        group = next(group for group in groups if any(parameter is member for member in group["params"]))
        return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

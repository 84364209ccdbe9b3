"""List the tensors of a rank that a checkpoint fills, and create optimizer state that does not exist yet.

The parameters exist before a load, but the optimizer's state only after its first step. It is created slice by
slice from the checkpoint's index, so a rank never allocates more than its plan needs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_place import BucketPiece, Options
from meshwise.data_parallel.engine_protocol import Engine
from meshwise.data_parallel.stored_slices import BucketSlice, StoredSlice, buffers, optimizer_slices, values_to_load
from meshwise.memory.chunked_update import ChunkedUpdate
from meshwise.model.parameter_table import ParameterRow


@dataclass(frozen=True)
class RefillSlot:
    """Dtype and full shape of one tensor in a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Slots: TypeAlias = Mapping[str, RefillSlot]
"""Saved tensors of one parameter, by slot: `parameter`, `optimizer/exp_avg`, `scalar/step`, `reduction/error`."""

OPTIMIZER_KINDS = ("optimizer", "scalar", "number")
"""Kinds of optimizer state, the first words of their slots: tensors, one-element tensors, Python numbers."""


@dataclass(frozen=True)
class _Number:
    """Saved scalar of one parameter. `finish` puts it into the optimizer state of the parameter's slice."""

    name: str
    slot: str
    state: dict[str, Any]
    device: torch.device
    tensor: Tensor


class CheckpointRefill:
    """One load of a checkpoint: the caller fills the tensors of `needed`; then `finish` sets the optimizer's state."""

    def __init__(self, engine: Engine, *, update: ChunkedUpdate, slots: Mapping[str, Slots]) -> None:
        """Check that the checkpoint fits the model; change nothing.

        slots: the saved tensors, by parameter name.

        Raises ValueError if a parameter is missing, unknown or of another shape. Raises it too if trained parameters
        with equal optimizer options have different state, as when some were frozen."""
        self._engine = engine
        self._update = update
        self._optimizer = update.optimizer
        self._slots = slots
        self._numbers: list[_Number] = []
        self._states: list[tuple[nn.Parameter, dict[str, Any]]] = []
        rows = {row.name for row in engine.table.rows}
        if unknown := sorted(slots.keys() - rows):
            raise ValueError(f"the checkpoint has parameters that the model has not: {_some(unknown)}")
        if missing := [row.name for row in engine.table.rows if "parameter" not in slots.get(row.name, {})]:
            raise ValueError(f"the checkpoint lacks parameters that the model has: {_some(missing)}")
        for row in engine.table.rows:
            _check_shape(row, slots[row.name]["parameter"])
        self._trained: dict[Options, list[str]] = {}
        for row in engine.table.rows:
            if row.trainable and row.numel:
                self._trained.setdefault(row.options, []).append(row.name)
        self._keys = {options: self._common_keys(names) for options, names in self._trained.items()}

    def needed(self) -> Iterator[StoredSlice]:
        """Yield every slice that the caller must fill on this rank; other ranks may store the same elements.

        Sets the reduction's state to zero. Optimizer tensors of the right shape and dtype are filled in place."""
        for bucket in (bucket for unit in self._engine.units for bucket in unit.buckets):
            here = values_to_load(bucket)
            for piece in bucket.place.pieces:
                yield from here.slices_of(piece, slot="parameter", within=(here.start, here.stop))
            for (part, parameter), (options, _) in zip(optimizer_slices(bucket), bucket.slices, strict=True):
                yield from self._state(part, parameter, options)
            yield from self._reduction_state(bucket)
        yield from buffers(self._engine.modules)

    def finish(self) -> None:
        """Replace the optimizer's state by the loaded state. Call it when all slices of `needed` are filled.

        Raises ValueError if the parameters of one slice were saved with different numbers, such as step counts."""
        first: dict[tuple[int, str], _Number] = {}
        for number in self._numbers:
            kind, _, key = number.slot.partition("/")
            known = first.setdefault((id(number.state), key), number)
            if not torch.equal(known.tensor, number.tensor):
                raise ValueError(
                    f"the optimizer's {key!r} is {known.tensor.item()} for {known.name} and {number.tensor.item()} for "
                    f"{number.name}; parameters that are updated together need equal values"
                )
            number.state[key] = number.tensor.item() if kind == "number" else known.tensor.to(number.device)
        for parameter, state in self._states:
            self._optimizer.state.pop(parameter, None)
            if state:
                self._optimizer.state[parameter] = state
        self._numbers, self._states = [], []

    def _common_keys(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the slots of the optimizer's state of parameters. Raises ValueError if they differ between these.

        Some plans update several parameters as one slice, so a single parameter cannot start with new state."""
        kinds = tuple(f"{kind}/" for kind in OPTIMIZER_KINDS)
        found = [(name, tuple(sorted(slot for slot in self._slots[name] if slot.startswith(kinds)))) for name in names]
        for name, keys in found[1:]:
            if keys != found[0][1]:
                raise ValueError(
                    f"the checkpoint has {', '.join(found[0][1]) or 'no optimizer state'} for {found[0][0]} and "
                    f"{', '.join(keys) or 'no optimizer state'} for {name}; was one of them frozen when it was saved? "
                    "Then load only the parameters: export the checkpoint, and load the exported file"
                )
        return found[0][1]

    def _reduction_state(self, bucket: Bucket) -> Iterator[StoredSlice]:
        """Set the reduction's state to zero, and yield the slices of it that the checkpoint has.

        A saved `summed_state` is a sum over ranks. So each rank loads only its shard, and has zeros elsewhere. State
        that is not saved is removed."""
        reduction = bucket.shard_group.storage.reduction
        for name in [name for name in bucket.reduction_state if name.partition("/")[0] not in reduction.names]:
            del bucket.reduction_state[name]
        for name, values in bucket.reduction_state.items():
            values.zero_()
            start, stop = bucket.owned if name in reduction.owned_state else bucket.shard
            for piece in bucket.place.pieces:
                if f"reduction/{name}" in self._slots[piece.row.name]:
                    whole = BucketSlice(bucket, start if values.numel() == stop - start else 0, values)
                    yield from whole.slices_of(piece, slot=f"reduction/{name}", within=(start, stop))

    def _state(self, part: BucketSlice, parameter: nn.Parameter, options: Options) -> Iterator[StoredSlice]:
        """Create the optimizer's state of one slice, and yield the slices to fill."""
        old = self._optimizer.state.get(parameter, {})
        new: dict[str, Any] = {}
        pieces = _inside(part)
        # A slice of padding alone has the state of any parameter with its options.
        names = [piece.row.name for piece in pieces] or self._trained.get(options, [])[:1]
        for slot in self._keys.get(options, ()):
            kind, _, key = slot.partition("/")
            if kind == "optimizer":
                new[key] = self._like(parameter, self._slots[names[0]], slot=slot, old=old.get(key))
                for piece in pieces:
                    values = BucketSlice(part.bucket, part.start, new[key])
                    yield from values.slices_of(piece, slot=slot, within=(part.start, part.stop))
            else:
                device = self._number_device(parameter)
                for name in names:
                    number = torch.zeros((), dtype=self._slots[name][slot].dtype)
                    self._numbers.append(_Number(name, slot, new, device, number))
                    yield StoredSlice.of_full(number, name=name, slot=slot)
        self._states.append((parameter, new))

    def _like(self, parameter: nn.Parameter, slots: Slots, *, slot: str, old: object) -> Tensor:
        """Return the tensor for one state of a slice: `old` if it has the right shape and dtype, else a new one.

        State that was saved in its parameter's dtype gets the dtype that the parameter has now."""
        follows = slots[slot] == slots["parameter"]
        dtype = parameter.dtype if follows else slots[slot].dtype
        if isinstance(old, Tensor) and old.shape == parameter.shape and old.dtype == dtype:
            return old
        return self._update.zero_state(parameter, key=slot.partition("/")[2], dtype=dtype)

    def _number_device(self, parameter: nn.Parameter) -> torch.device:
        """Return the device of a parameter's scalar state: the parameter's if fused or capturable, else the CPU."""
        for group in self._optimizer.param_groups:
            if any(parameter is member for member in group["params"]):
                return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        raise AssertionError("the optimizer does not have the slice")


def _inside(part: BucketSlice) -> list[BucketPiece]:
    """Return the pieces that have elements in a slice; none if it is padding."""
    pieces = part.bucket.place.pieces
    return [piece for piece in pieces if max(piece.start, part.start) < min(piece.stop, part.stop)]


def _check_shape(row: ParameterRow, found: RefillSlot) -> None:
    """Raise ValueError if the saved parameter has another shape than the model's."""
    wanted = (*row.shape, *((2,) if row.dtype.is_complex else ()))
    if found.shape != wanted:
        raise ValueError(f"{row.name} has the shape {found.shape} in the checkpoint and {wanted} in the model")


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


_SHOWN = 5

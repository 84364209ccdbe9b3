"""Slots that a rank fills when it loads a checkpoint.

The parameters are there already; the optimizer's state is not, before its first step. It is made slice by slice from
the checkpoint's index, so a rank never holds more than its plan says.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_place import BucketPiece
from meshwise.data_parallel.engine_protocol import Engine
from meshwise.data_parallel.stored_slices import BucketSlice, StoredSlice, buffers, stored, updated
from meshwise.memory.chunked_update import ChunkedUpdate
from meshwise.model.parameter_table import ParameterRow


@dataclass(frozen=True)
class RefillSlot:
    """Dtype and shape of a saved tensor of one parameter."""

    dtype: torch.dtype
    shape: tuple[int, ...]


Slots = Mapping[str, RefillSlot]
"""By the slot's name: `parameter`, `optimizer/exp_avg`, `scalar/step`, `reduction/error`."""

OPTIMIZER_KINDS = ("optimizer", "scalar", "number")
"""First words of the slots that hold an optimizer's state."""


@dataclass(frozen=True)
class _Number:
    """A number of a parameter, to be put into the state of the slice that holds the parameter."""

    name: str
    slot: str
    state: dict[str, Any]
    device: torch.device
    tensor: Tensor


class CheckpointRefill:
    """A load under way: `needed` says what to fill, `finish` makes it the state that the next step starts from.

    `slots` says what there is to load, by the name of the parameter. Raises ValueError for a parameter that is not
    there or has another shape, and for optimizer state that is there for some of the trained parameters only. Nothing
    is changed before the tensors of `needed` are.
    """

    def __init__(self, engine: Engine, *, update: ChunkedUpdate, slots: Mapping[str, Slots]) -> None:
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
        self._trained = [row.name for row in engine.table.rows if row.trainable and row.numel]
        self._keys = self._common_keys()

    def needed(self) -> Iterator[StoredSlice]:
        """Yield every slice that this rank keeps between steps; other ranks may keep the same elements."""
        for bucket in self._buckets():
            here = stored(bucket)
            for piece in bucket.place.pieces:
                yield from here.holdings(piece, slot="parameter", within=(here.start, here.stop))
            for part, parameter in updated(bucket):
                yield from self._state(part, parameter)
            yield from self._reduction_state(bucket)
        yield from buffers(self._engine.modules)

    def finish(self) -> None:
        """Give the optimizer its state.

        Raises ValueError when the parameters of one slice were saved with different numbers.
        """
        first: dict[tuple[int, str], _Number] = {}
        for number in self._numbers:
            kind, _, key = number.slot.partition("/")
            known = first.setdefault((id(number.state), key), number)
            if not torch.equal(known.tensor, number.tensor):
                raise ValueError(
                    f"the optimizer's {key!r} is {known.tensor.item()} for {known.name} and {number.tensor.item()} for "
                    f"{number.name}; parameters that are updated together need the same"
                )
            number.state[key] = number.tensor.item() if kind == "number" else known.tensor.to(number.device)
        for parameter, state in self._states:
            self._optimizer.state.pop(parameter, None)
            if state:
                self._optimizer.state[parameter] = state
        self._numbers, self._states = [], []

    def _buckets(self) -> Iterator[Bucket]:
        for unit in self._engine.units:
            yield from unit.buckets

    def _common_keys(self) -> tuple[str, ...]:
        """Return the slots of the optimizer's state, the same for all trained parameters. Raises ValueError otherwise.

        Under one plan parameters are updated together that are apart under another, so none can begin anew alone.
        Those without elements have no state.
        """
        found = [(name, tuple(sorted(filter(_is_optimizer_slot, self._slots[name])))) for name in self._trained]
        for name, keys in found[1:]:
            if keys != found[0][1]:
                raise ValueError(
                    f"the checkpoint has {', '.join(found[0][1]) or 'no optimizer state'} for {found[0][0]} and "
                    f"{', '.join(keys) or 'no optimizer state'} for {name}; was one of them frozen when it was saved? "
                    "Then take the parameters alone, with a new optimizer: export it and load what was exported"
                )
        return found[0][1] if found else ()

    def _reduction_state(self, bucket: Bucket) -> Iterator[StoredSlice]:
        """Yield what to fill of the reduction's state, which is zero where the checkpoint has none.

        The sum of a `summed_state` goes to the ranks by their shards: each holds its shard of it, and zeros elsewhere.
        """
        for name, values in bucket.reduction_state.items():
            values.zero_()
            start, stop = bucket.owned if name in bucket.shard_group.reduction.owned_state else bucket.shard
            for piece in bucket.place.pieces:
                if f"reduction/{name}" in self._slots[piece.row.name]:
                    whole = BucketSlice(bucket, start if values.numel() == stop - start else 0, values)
                    yield from whole.holdings(piece, slot=f"reduction/{name}", within=(start, stop))

    def _state(self, part: BucketSlice, parameter: nn.Parameter) -> Iterator[StoredSlice]:
        """Make the optimizer's state of a slice, and say what to fill it with."""
        old = self._optimizer.state.get(parameter, {})
        new: dict[str, Any] = {}
        pieces = _inside(part)
        names = [piece.row.name for piece in pieces] or self._trained[:1]  # of padding, those of any other
        for slot in self._keys:
            kind, _, key = slot.partition("/")
            if kind == "optimizer":
                new[key] = self._like(parameter, self._slots[names[0]], slot=slot, old=old.get(key))
                for piece in pieces:
                    values = BucketSlice(part.bucket, part.start, new[key])
                    yield from values.holdings(piece, slot=slot, within=(part.start, part.stop))
            else:
                device = self._number_device(parameter)
                for name in names:
                    number = torch.zeros((), dtype=self._slots[name][slot].dtype)
                    self._numbers.append(_Number(name, slot, new, device, number))
                    yield StoredSlice.whole(number, name=name, slot=slot)
        self._states.append((parameter, new))

    def _like(self, parameter: nn.Parameter, slots: Slots, *, slot: str, old: object) -> Tensor:
        """Return a tensor for state of a slice: what is there already, where it is of the kind needed.

        State that was saved in the dtype of its parameter follows the parameter to the dtype it has now.
        """
        follows = slots[slot] == slots["parameter"]
        dtype = parameter.dtype if follows else slots[slot].dtype
        if isinstance(old, Tensor) and old.shape == parameter.shape and old.dtype == dtype:
            return old
        return self._update.zero_state(parameter, key=slot.partition("/")[2], dtype=dtype)

    def _number_device(self, parameter: nn.Parameter) -> torch.device:
        """Return the device on which torch's optimizers keep the scalar state of a parameter."""
        for group in self._optimizer.param_groups:
            if any(parameter is member for member in group["params"]):
                return parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        raise AssertionError("the optimizer does not have the slice")


def _is_optimizer_slot(slot: str) -> bool:
    return slot.partition("/")[0] in OPTIMIZER_KINDS


def _inside(part: BucketSlice) -> list[BucketPiece]:
    """Return the parameters that have elements in a slice; padding has none."""
    pieces = part.bucket.place.pieces
    return [piece for piece in pieces if max(piece.start, part.start) < min(piece.stop, part.stop)]


def _check_shape(row: ParameterRow, found: RefillSlot) -> None:
    """Raise ValueError unless the parameter to load has the right shape."""
    wanted = (*row.shape, *((2,) if row.dtype.is_complex else ()))
    if found.shape != wanted:
        raise ValueError(f"{row.name} has the shape {found.shape} in the checkpoint and {wanted} in the model")


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


_SHOWN = 5

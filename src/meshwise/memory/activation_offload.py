"""Move the tensors that a forward saves for its backward to the CPU or to disk.

The backward needs most saved tensors much later, and in reverse order. So a tensor can leave the device while the
forward continues, and come back before the backward needs the tensor:

    forward    save a │ save b │ save c │ …        backward    … │ needs c │ needs b │ needs a
    out           └a out──┘└b out──┘                back          b back ──┘└ a back ──┘

    tier    path of a tensor
    cpu     from the GPU to pinned memory of the host and back, on a separate CUDA stream. (torch's `save_on_cpu`
            copies on the compute stream, which then waits for every copy.) Nothing moves if the CPU computes.
    disk    through a few aligned buffers into the swap file, by the file's threads; with a GPU the buffers are pinned

A storage moves once for all saved tensors in it: queries, keys and values are three views of one product. It comes back
with the same bytes, and its tensors with the same strides. Parameters, buffers and small tensors stay. A recomputed
block saves only its inputs, so only they move."""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwise.comm.api.streams import Streams
from meshwise.memory.rehearsed_movers import RehearsedMover
from meshwise.memory.staging_buffers import SwapConfig
from meshwise.memory.storage_movers import (
    ActivationTransfers,
    DiskMover,
    HostMover,
    ParkedStorage,
    StorageMover,
    alive,
)
from meshwise.memory.swap_file import SwapFile

_LARGEST_RATIO = 8
"""A storage stays on the device if it is more than this many times larger than its saved view."""


class ActivationTier:
    """Tier to which one rank moves the activations that autograd saves."""

    def __init__(self, tier: str, *, mover: StorageMover, transfers: ActivationTransfers) -> None:
        """`tier`: `cpu` or `disk`. `mover`: moves storages to the tier. `transfers`: the limits of the moves."""
        self.tier = tier
        self.mover = mover
        self._transfers = transfers

    @contextlib.contextmanager
    def saving(self, model: nn.Module) -> Iterator[None]:
        """Move the tensors that a forward of `model` saves in the block; parameters and buffers stay."""
        saved = _SavedTensors(self.mover, model, self._transfers)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            yield


@dataclass(frozen=True)
class _View:
    """A saved tensor whose storage has left the device: the storage, and the tensor's view of it."""

    parked: ParkedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedTensors:
    """Pack and unpack hooks for one forward's saved tensors. `before` links their storages in the order of saving."""

    def __init__(self, mover: StorageMover, model: nn.Module, transfers: ActivationTransfers) -> None:
        self._mover, self._model, self._transfers = mover, model, transfers
        self._own = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
        self._known: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[ParkedStorage]]] = {}
        self._last: weakref.ref[ParkedStorage] | None = None

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Return the object that autograd keeps for a saved tensor: a `_View`, or the tensor if it stays."""
        if not self._moves(tensor):
            return tensor.detach()
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        known, known_parked = self._known.get(key, (None, None))
        parked = known_parked() if known is not None and known_parked is not None and known() is not None else None
        if parked is None:
            values = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            parked = self._mover.park(values, before=alive(self._last))
            self._known[key] = weakref.ref(storage), weakref.ref(parked)
            self._last = weakref.ref(parked)
        return _View(parked, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Tensor | _View) -> Tensor:
        """Return the saved tensor for the object that `pack` returned, and start to bring back the next storages."""
        if isinstance(saved, Tensor):
            return saved
        values = saved.parked.fetch(ahead=self._transfers.ahead)
        whole = values[: values.numel() // saved.dtype.itemsize * saved.dtype.itemsize].view(saved.dtype)
        return whole.as_strided(saved.shape, saved.stride, whole.storage_offset() + saved.offset)

    def _moves(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
            return False
        if tensor.device.type != self._mover.device.type:
            return False
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if not self._transfers.least <= size <= _LARGEST_RATIO * tensor.nbytes:
            return False
        return not self._is_the_models(storage._cdata)

    def _is_the_models(self, storage: int) -> bool:
        """Return whether a storage holds parameters or buffers. A gather may put parameters into a new storage."""
        if storage in self._own:
            return True
        found = {parameter.untyped_storage()._cdata for parameter in self._model.parameters()}
        self._own |= found
        return storage in found


def activation_tier(
    tier: str, *, streams: Streams, swap: SwapConfig, transfers: ActivationTransfers
) -> ActivationTier | None:
    """Return the `ActivationTier` for `tier` (`device`, `cpu` or `disk`); None if activations stay on the device.

    `streams`: of the device that computes. The tier `cpu` moves nothing if it is no GPU. Raises TierError if no swap
    file can be made."""
    device = streams.device
    if tier == "device" or (tier == "cpu" and device.type != "cuda"):
        return None
    mover: StorageMover
    if device.type == "meta":
        mover = RehearsedMover(transfers)
    elif tier == "cpu":
        mover = HostMover(streams)
    else:
        mover = DiskMover(SwapFile(swap.folder), streams=streams, transfers=transfers)
    return ActivationTier(tier, mover=mover, transfers=transfers)

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
block saves only its inputs, so only they move.

A `StorageMover` moves the storages: `DiskMover`, `HostMover` to a GPU's host, or `RehearsedMover`, which only counts
bytes. `activation_tier` makes the mover of a plan's tier."""

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwise.comm.api.streams import Stream, StreamEvent, Streams
from meshwise.memory.swap_file import PinnedSlabs, SwapConfig, SwapFile, SwapTransfer, aligned, whole_blocks

_LARGEST_RATIO = 8
"""A storage stays on the device if it is more than this many times larger than its saved view."""


@dataclass(frozen=True)
class ActivationTransfers:
    """Limits for moving activations, in bytes.

    | least    smallest storage that is moved
    | ahead    bytes that the backward brings back before it needs them
    | staged   most bytes of the buffers between the device and the disk, in total"""

    least: int = 64 * 2**10
    ahead: int = 64 * 2**20
    staged: int = 64 * 2**20


class ParkedStorage(ABC):
    """A storage that has left the device. Its copy in the tier is freed with this object."""

    def __init__(self, size: int, *, before: "ParkedStorage | None") -> None:
        """`size`: bytes of the storage. `before`: the storage parked just before; the backward needs it next."""
        self.size = size
        self._before = None if before is None else weakref.ref(before)

    @abstractmethod
    def start(self) -> None:
        """Start to bring the bytes back to the device; a second call does nothing."""

    @abstractmethod
    def get(self) -> Tensor:
        """Wait for the bytes, whose return `start` has begun, and return them as a uint8 tensor on the device."""

    def fetch(self, *, ahead: int) -> Tensor:
        """Return the bytes as `get` does, and start to bring back `ahead` bytes of earlier parked storages."""
        self.start()
        parked = alive(self._before)
        while parked is not None and ahead > 0:
            parked.start()
            ahead -= parked.size
            parked = alive(parked._before)
        return self.get()


def alive(parked: weakref.ref[ParkedStorage] | None) -> ParkedStorage | None:
    """Return the storage that the weak reference `parked` refers to, or None if it no longer exists."""
    return None if parked is None else parked()


class StorageMover(ABC):
    """Mover of storages away from a device and back."""

    device: torch.device
    streams: Streams
    _out: Stream
    used = 0
    """Bytes that are off the device now."""
    peak = 0
    """Largest number of bytes that were off the device at one time."""

    @abstractmethod
    def park(self, values: Tensor, *, before: ParkedStorage | None) -> ParkedStorage:
        """Start to move a storage, given as its bytes `values` (uint8). `before`: see `ParkedStorage`."""

    @abstractmethod
    def close(self) -> None:
        """Free the host memory, or close the file, to which storages move."""

    def count(self, size: int) -> None:
        """Count `size` bytes that leave the device; a negative `size` counts bytes that return."""
        self.used += size
        self.peak = max(self.peak, self.used)

    def _copy_out(self, values: Tensor, into: Tensor) -> StreamEvent:
        """Start to copy device memory to host memory on the stream `_out`, and return the event of its end."""
        self._out.wait_stream(self.streams.current())
        with self.streams.use(self._out):
            into.copy_(values, non_blocking=True)
            copied = self.streams.mark()
        self.streams.keep(values, stream=self._out)
        return copied


# ---- movers to disk ----------------------------------------------------------------------------------------------


class DiskMover(StorageMover):
    """Mover of storages to a swap file and back."""

    def __init__(self, file: SwapFile, *, streams: Streams, transfers: ActivationTransfers) -> None:
        self.file = file
        self.streams = streams
        self.device = streams.device
        self._buffers = _BoundedBuffers(transfers.staged)
        self._out = self.streams.create()
        self._free: dict[int, list[int]] = defaultdict(list)
        self._lock = threading.Lock()

    def park(self, values: Tensor, *, before: ParkedStorage | None) -> ParkedStorage:
        """Copy `values` to a buffer, and start to write it. Raises TierError if the disk has no room."""
        size = values.numel()
        rounded = whole_blocks(size)
        offset = self._place(rounded)
        buffer = self._buffers.take(rounded, streams=self.streams)
        copied = self._copy_out(values, buffer[:size])
        written = self.file.write(offset, values=buffer, after=copied.synchronize)
        lent = [buffer]  # the transfer keeps its callback, which must not keep the buffer alive
        del buffer
        written.then(lambda: self._buffers.give(lent.pop()))
        return _StorageOnDisk(self, offset, written, size, before)

    def _place(self, size: int) -> int:
        with self._lock:
            self.count(size)
            if self._free[size]:
                return self._free[size].pop()
        return self.file.place(self.file.allocate(size, dtype=torch.uint8))

    def close(self) -> None:
        """Close the file when its transfers have ended."""
        self.file.close()

    def free(self, offset: int, *, size: int) -> None:
        """Free `size` bytes of the file from `offset` on, for later storages of the same size."""
        with self._lock:
            self.count(-size)
            self._free[size].append(offset)


class _StorageOnDisk(ParkedStorage):
    def __init__(
        self, mover: DiskMover, offset: int, written: SwapTransfer, size: int, before: ParkedStorage | None
    ) -> None:
        super().__init__(size, before=before)
        self._mover, self._offset, self._written = mover, offset, written
        self._buffer: Tensor | None = None
        self._read: SwapTransfer | None = None
        self._back: Tensor | None = None

    def start(self) -> None:
        if self._read is None:
            self._written.wait()
            self._buffer = aligned(whole_blocks(self.size), streams=self._mover.streams)
            self._read = self._mover.file.read(self._offset, into=self._buffer)

    def get(self) -> Tensor:
        if self._back is None:
            assert self._read is not None
            assert self._buffer is not None
            self._read.wait()
            self._back = self._buffer[: self.size].to(self._mover.device, non_blocking=True)
        return self._back

    def __del__(self) -> None:
        # Wait for transfers to or from this range of the file before another storage uses the range.
        for transfer in (self._written, self._read):
            if transfer is not None:
                with contextlib.suppress(Exception):
                    transfer.wait()
        self._mover.free(self._offset, size=whole_blocks(self.size))


class _BoundedBuffers:
    """Aligned buffers of at most `most` bytes in total; `take` waits until enough buffers are given back."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._changed = threading.Condition()

    def take(self, size: int, *, streams: Streams) -> Tensor:
        """Return a buffer of `size` bytes. A buffer larger than `most` is lent only while no other buffer is lent."""
        with self._changed:
            while self._taken and self._taken + size > self._most:
                self._changed.wait()
            self._taken += size
            if self._free[size]:
                return self._free[size].pop()
            self._free = defaultdict(list, {key: kept for key, kept in self._free.items() if key == size})
        return aligned(size, streams=streams)

    def give(self, buffer: Tensor) -> None:
        """Return `buffer` to the free buffers, and wake waiting calls of `take`."""
        with self._changed:
            self._taken -= buffer.numel()
            self._free[buffer.numel()].append(buffer)
            self._changed.notify_all()


# ---- movers to the CPU -------------------------------------------------------------------------------------------


class HostMover(StorageMover):
    """Mover of a GPU's storages to pinned memory of the host and back."""

    def __init__(self, streams: Streams) -> None:
        self.device = streams.device
        self.streams = streams
        self._out, self.back = self.streams.create(), self.streams.create()
        self._pinned = PinnedSlabs(streams)
        self._free: dict[int, list[tuple[Tensor, StreamEvent]]] = defaultdict(list)

    def park(self, values: Tensor, *, before: ParkedStorage | None) -> ParkedStorage:
        """Start to copy `values` on another stream, after the work issued so far; the compute stream does not wait."""
        size = values.numel()
        self.count(size)
        if self._free[size]:
            host, read = self._free[size].pop()
            self._out.wait_event(read)
        else:
            host = self._pinned.cut(size)
        return _StorageOnHost(self, host, self._copy_out(values, host), before)

    def close(self) -> None:
        """Free the buffers in host memory."""
        self._free.clear()

    def free(self, host: Tensor, *, read: StreamEvent) -> None:
        """Free a host buffer. The next copy to the buffer waits for `read`, the end of the last copy from it."""
        self.count(-host.numel())
        self._free[host.numel()].append((host, read))


class _StorageOnHost(ParkedStorage):
    def __init__(self, mover: HostMover, host: Tensor, copied: StreamEvent, before: ParkedStorage | None) -> None:
        super().__init__(host.numel(), before=before)
        self._mover, self._host, self._copied = mover, host, copied
        self._back: Tensor | None = None
        self._arrived = mover.streams.event()

    def start(self) -> None:
        if self._back is None:
            self._mover.back.wait_event(self._copied)
            with self._mover.streams.use(self._mover.back):
                self._back = self._host.to(self._mover.device, non_blocking=True)
                self._arrived.record(self._mover.back)

    def get(self) -> Tensor:
        assert self._back is not None
        current = self._mover.streams.current()
        current.wait_event(self._arrived)
        self._mover.streams.keep(self._back, stream=current)
        return self._back

    def __del__(self) -> None:
        self._mover.free(self._host, read=self._arrived)


# ---- movers in a rehearsal -----------------------------------------------------------------------------------------


class RehearsedMover(StorageMover):
    """Stand-in for a `DiskMover` that only counts bytes, as if the disk were slow and all buffers were full."""

    def __init__(self, transfers: ActivationTransfers) -> None:
        self.device = torch.device("meta")
        self.on_new_buffer: Callable[[Tensor], None] = lambda _: None
        """Called with each buffer when the buffer is made."""
        self._most = transfers.staged
        self._buffers: list[Tensor] = []

    @property
    def staged(self) -> int:
        """Bytes of all buffers that writes to the disk would fill."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def park(self, values: Tensor, *, before: ParkedStorage | None) -> ParkedStorage:
        """Count a storage in whole blocks of the file; make a buffer if a slow disk would need one more."""
        size = whole_blocks(values.numel())
        self.count(size)
        if self.staged < self.peak and (not self._buffers or self.staged + size <= self._most):
            self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            self.on_new_buffer(self._buffers[-1])
        return _CountedStorage(self, size, before)

    def close(self) -> None:
        """Do nothing: there is no memory and no file."""


class _CountedStorage(ParkedStorage):
    def __init__(self, mover: RehearsedMover, size: int, before: ParkedStorage | None) -> None:
        super().__init__(size, before=before)
        self._mover = mover
        self._back: Tensor | None = None

    def start(self) -> None:
        if self._back is None:
            self._back = torch.empty(self.size, dtype=torch.uint8, device=self._mover.device)

    def get(self) -> Tensor:
        assert self._back is not None
        return self._back

    def __del__(self) -> None:
        self._mover.count(-self.size)


# ---- tensors saved by autograd --------------------------------------------------------------------------------------


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

"""Move the tensors that a forward saves for its backward to the CPU or to disk.

The backward needs most saved tensors much later, and in reverse order. So a tensor can leave the device while the
forward continues, and come back before the backward needs the tensor:

    forward    save a │ save b │ save c │ …        backward    … │ needs c │ needs b │ needs a
    out           └a out──┘└b out──┘                back          b back ──┘└ a back ──┘

docs/memory.md has the way of a storage to each tier, what moves and what stays ("Activations"). torch's `save_on_cpu`
copies on the compute stream, which then waits for every copy.

A `StorageMover` moves the storages: `DiskMover`, `HostMover` to a GPU's host, or `RehearsedMover`, which only counts
bytes. `activation_tier` makes the mover of a plan's tier."""

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwise.comm.api.streams import StreamEvent, Streams
from meshwise.memory.swap_file import BufferPool, PinnedSlabs, SwapConfig, SwapFile, SwapTransfer, aligned, whole_blocks


@dataclass(frozen=True)
class ActivationTransfers:
    """Limits for moving activations, in bytes.

    | least    smallest storage that is moved
    | ahead    bytes that the backward brings back in advance, each time that it needs a storage
    | staged   most bytes of the buffers between the device and the disk, in total"""

    least: int = 64 * 2**10
    ahead: int = 64 * 2**20
    staged: int = 64 * 2**20


class ParkedStorage:
    """A storage that has left the device. Its copy in the tier is freed with this object."""

    def __init__(
        self,
        size: int,
        *,
        before: "ParkedStorage | None",
        bring: Callable[[], Callable[[], Tensor]],
        free: Callable[[], None],
    ) -> None:
        """`size`: bytes of the storage. `before`: the storage parked just before; the backward needs it next.

        `bring` starts to bring the bytes back to the device. It returns a function that waits for them, and returns
        them as a uint8 tensor. `free` frees the copy in the tier."""
        self.size = size
        self._before = _none if before is None else weakref.ref(before)
        self._bring, self._free = bring, free
        self._arriving: Callable[[], Tensor] | None = None

    def start(self) -> Callable[[], Tensor]:
        """Start to bring the bytes back, unless a call has done so; return the function that waits for them."""
        if self._arriving is None:
            self._arriving = self._bring()
        return self._arriving

    def fetch(self, *, ahead: int) -> Tensor:
        """Return the bytes on the device, and start to bring back `ahead` bytes of earlier parked storages."""
        arriving, parked = self.start(), self._before()
        while parked is not None and ahead > 0:
            parked.start()
            ahead -= parked.size
            parked = parked._before()
        return arriving()

    def __del__(self) -> None:
        self._free()


def _none() -> None:
    """Return None, as a weak reference to an object that does not exist."""


class StorageMover(ABC):
    """Mover of storages away from a device and back."""

    device: torch.device
    used = 0
    """Bytes that are off the device now."""
    peak = 0
    """Largest number of bytes that were off the device at one time."""

    @abstractmethod
    def park(self, values: Tensor, *, before: ParkedStorage | None) -> ParkedStorage:
        """Start to move a storage, given as its bytes `values` (uint8). `before`: see `ParkedStorage`."""

    def close(self) -> None:  # noqa: B027 - a mover may have nothing to close
        """Free the host memory, or close the file, to which storages move."""

    def count(self, size: int) -> None:
        """Count `size` bytes that leave the device; a negative `size` counts bytes that return."""
        self.used += size
        self.peak = max(self.peak, self.used)


class DiskMover(StorageMover):
    """Mover of storages to a swap file and back."""

    def __init__(self, file: SwapFile, *, streams: Streams, transfers: ActivationTransfers) -> None:
        self.file = file
        self.streams = streams
        self.device = streams.device
        self._buffers = BufferPool(transfers.staged, streams=streams)
        self._out = self.streams.create()
        self._free: dict[int, list[int]] = defaultdict(list)
        self._lock = threading.Lock()

    def park(self, values: Tensor, *, before: ParkedStorage | None) -> ParkedStorage:
        """Copy `values` to a buffer, and start to write it. Raises TierError if the disk has no room."""
        size = values.numel()
        rounded = whole_blocks(size)
        offset = self._place(rounded)
        buffer = self._buffers.take(rounded)
        copied = self.streams.copy_on(self._out, values=values, into=buffer[:size])
        written = self.file.write(offset, values=buffer, after=copied.synchronize)
        lent = [buffer]  # the transfer keeps its callback, which must not keep the buffer alive
        del buffer
        written.then(lambda: self._buffers.give(lent.pop()))
        transfers = [written]

        def bring() -> Callable[[], Tensor]:
            written.wait()
            target = aligned(rounded, streams=self.streams)
            transfers.append(self.file.read(offset, into=target))

            @cache
            def arrive() -> Tensor:
                transfers[-1].wait()
                return target[:size].to(self.device, non_blocking=True)

            return arrive

        def free() -> None:
            # Wait for transfers to or from this range of the file before another storage uses the range.
            with contextlib.suppress(Exception):
                SwapTransfer.of(transfers).wait()
            with self._lock:
                self.count(-rounded)
                self._free[rounded].append(offset)

        return ParkedStorage(size, before=before, bring=bring, free=free)

    def _place(self, size: int) -> int:
        with self._lock:
            self.count(size)
            if self._free[size]:
                return self._free[size].pop()
        return self.file.place(self.file.allocate(size, dtype=torch.uint8))

    def close(self) -> None:
        """Close the file when its transfers have ended."""
        self.file.close()


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
        copied, arrived = self.streams.copy_on(self._out, values=values, into=host), self.streams.event()

        def bring() -> Callable[[], Tensor]:
            self.back.wait_event(copied)
            with self.streams.use(self.back):
                back = host.to(self.device, non_blocking=True)
                arrived.record(self.back)

            def arrive() -> Tensor:
                current = self.streams.current()
                current.wait_event(arrived)
                self.streams.keep(back, stream=current)
                return back

            return arrive

        def free() -> None:
            self.count(-size)
            self._free[size].append((host, arrived))  # the next copy to `host` waits for the last copy from it

        return ParkedStorage(size, before=before, bring=bring, free=free)

    def close(self) -> None:
        """Free the buffers in host memory."""
        self._free.clear()


class RehearsedMover(StorageMover):
    """Stand-in for a `DiskMover` that only counts bytes, as if the disk were slow and all buffers were full."""

    def __init__(self, transfers: ActivationTransfers) -> None:
        self.device = torch.device("meta")
        self.on_new_buffer: Callable[[Tensor], None] = lambda _: None
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

        def bring() -> Callable[[], Tensor]:
            back = torch.empty(size, dtype=torch.uint8, device=self.device)
            return lambda: back

        return ParkedStorage(size, before=before, bring=bring, free=lambda: self.count(-size))


# ---- tensors saved by autograd --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationTier:
    """Tier (`cpu` or `disk`) to which one rank moves the activations that autograd saves, by a mover, within limits."""

    tier: str
    mover: StorageMover
    transfers: ActivationTransfers

    @contextlib.contextmanager
    def saving(self, model: nn.Module) -> Iterator[None]:
        """Move the tensors that a forward of `model` in the block saves, except its parameters and buffers."""
        saved = _SavedTensors(self.mover, model, self.transfers)
        with saved_tensors_hooks(saved.pack, lambda tensor: tensor()):
            yield


class _SavedTensors:
    """Pack hook for one forward's saved tensors. `before` links their storages in the order of saving."""

    def __init__(self, mover: StorageMover, model: nn.Module, transfers: ActivationTransfers) -> None:
        self._mover, self._model, self._transfers = mover, model, transfers
        self._own = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
        self._known: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[ParkedStorage]]] = {}
        self._last: Callable[[], ParkedStorage | None] = _none

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that autograd keeps in place of a saved tensor, and that returns the tensor.

        For a tensor that has moved, the function also starts to bring back the next storages."""
        if not self._moves(tensor):
            stays = tensor.detach()
            return lambda: stays
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        same_storage, known = self._known.get(key, (_none, _none))
        parked = None if same_storage() is None else known()
        if parked is None:
            values = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            parked = self._mover.park(values, before=self._last())
            self._known[key] = weakref.ref(storage), weakref.ref(parked)
            self._last = weakref.ref(parked)
        fetch = partial(parked.fetch, ahead=self._transfers.ahead)
        dtype, shape, stride, offset = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())

        def moved() -> Tensor:
            values = fetch()
            whole = values[: values.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            return whole.as_strided(shape, stride, whole.storage_offset() + offset)

        return moved

    def _moves(self, tensor: Tensor) -> bool:
        plain = tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter)
        if not plain or tensor.device.type != self._mover.device.type:
            return False
        storage = tensor.untyped_storage()
        if not self._transfers.least <= storage.nbytes() <= 8 * tensor.nbytes:  # a small view of a storage stays
            return False
        if storage._cdata not in self._own:  # a gather may have put parameters into a new storage
            self._own |= {parameter.untyped_storage()._cdata for parameter in self._model.parameters()}
        return storage._cdata not in self._own


def activation_tier(
    tier: str, *, streams: Streams, swap: SwapConfig, transfers: ActivationTransfers
) -> ActivationTier | None:
    """Return the `ActivationTier` for `tier` (`device`, `cpu` or `disk`); None if activations stay on the device.

    `streams`: of the device that computes; if it is no GPU, the tier `cpu` moves nothing. Raises TierError."""
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

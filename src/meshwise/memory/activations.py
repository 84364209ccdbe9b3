"""What a forward saves for its backward, on the CPU or on disk in between.

Most of what a forward saves is asked for much later, in the reverse order. So it can leave the device while the forward
goes on, and come back before the backward asks:

    forward    save a │ save b │ save c │ …        backward    … │ needs c │ needs b │ needs a
    out           └a out──┘└b out──┘                back          b back ──┘└ a back ──┘

    cpu     from a GPU to pinned memory of the host and back, on a stream of their own (torch's `save_on_cpu` copies on
            the stream that computes, which waits for every copy). A rank that computes on the CPU has them there.
    disk    through a few aligned buffers into the file of the tier, by its threads; pinned ones when there is a GPU

What moves is a whole storage, once for all tensors in it (queries, keys and values are three views of one product), and
comes back as the same bytes under the same strides. Parameters, buffers and small tensors stay. Under recomputation
what is saved are the blocks' inputs, and those move.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwise.memory.staging import Swap
from meshwise.memory.swap import BLOCK, SwapFile, Transfer, aligned

_VIEWS = 8
"""A storage that is more than so many times as large as what is saved of it stays where it is."""


@dataclass(frozen=True)
class Saving:
    """How activations move.

    least    bytes that are worth moving
    ahead    bytes that are brought back before they are asked for
    staged   bytes of buffers on the way to the disk
    """

    least: int = 64 * 2**10
    ahead: int = 64 * 2**20
    staged: int = 64 * 2**20

    def __post_init__(self) -> None:
        if min(self.least, self.ahead, self.staged) < 1:
            raise ValueError(f"{self}: give at least 1 byte of each")


class Activations:
    """The tier of one rank's activations."""

    def __init__(self, tier: str, *, mover: Mover, how: Saving) -> None:
        self.tier = tier
        self._mover = mover
        self._how = how

    def close(self) -> None:
        """Give the memory and the file back."""
        self._mover.close()

    @property
    def peak(self) -> int:
        """The most bytes that were away at one time."""
        return self._mover.peak

    @contextlib.contextmanager
    def saving(self, model: nn.Module) -> Iterator[None]:
        """Inside runs a forward of the model, whose own tensors stay."""
        line = _Line(self._mover, model, self._how)
        with saved_tensors_hooks(line.pack, line.unpack):
            yield


class Parked(ABC):
    """A storage that is away."""

    def __init__(self, size: int, *, before: Parked | None) -> None:
        self.size = size
        self._before = None if before is None else weakref.ref(before)

    @abstractmethod
    def start(self) -> None:
        """Start to bring it back; once is enough."""

    @abstractmethod
    def get(self) -> Tensor:
        """Its bytes, on the device."""

    def fetch(self, *, ahead: int) -> Tensor:
        """Its bytes, while so many bytes of what was saved before it are on their way."""
        self.start()
        parked = _alive(self._before)
        while parked is not None and ahead > 0:
            parked.start()
            ahead -= parked.size
            parked = _alive(parked._before)
        return self.get()


def _alive(parked: weakref.ref[Parked] | None) -> Parked | None:
    return None if parked is None else parked()


class Mover(ABC):
    """What takes storages away."""

    peak = 0

    @abstractmethod
    def park(self, values: Tensor, *, before: Parked | None) -> Parked:
        """Start to move the bytes of a storage; `before` is what was saved before it."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it moves to."""


@dataclass(frozen=True)
class _View:
    """A saved tensor whose storage is away."""

    parked: Parked
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Line:
    """What one forward has saved, in order."""

    def __init__(self, mover: Mover, model: nn.Module, how: Saving) -> None:
        self._mover, self._model, self._how = mover, model, how
        self._own = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
        self._known: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[Parked]]] = {}
        self._last: weakref.ref[Parked] | None = None

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Autograd saves a tensor."""
        if not self._moves(tensor):
            return tensor.detach()
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version
        held, known = self._known.get(key, (None, None))
        parked = known() if held is not None and known is not None and held() is not None else None
        if parked is None:
            values = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            parked = self._mover.park(values, before=_alive(self._last))
            self._known[key] = weakref.ref(storage), weakref.ref(parked)
            self._last = weakref.ref(parked)
        return _View(parked, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Tensor | _View) -> Tensor:
        """Autograd wants it back."""
        if isinstance(saved, Tensor):
            return saved
        values = saved.parked.fetch(ahead=self._how.ahead)
        whole = values[: values.numel() // saved.dtype.itemsize * saved.dtype.itemsize].view(saved.dtype)
        return whole.as_strided(saved.shape, saved.stride, whole.storage_offset() + saved.offset)

    def _moves(self, tensor: Tensor) -> bool:
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            return False
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        return self._how.least <= size <= _VIEWS * tensor.nbytes and not self._is_the_models(storage._cdata)

    def _is_the_models(self, storage: int) -> bool:
        """Whether it holds parameters (which are somewhere else before they are gathered) or buffers."""
        if storage in self._own:
            return True
        found = {parameter.untyped_storage()._cdata for parameter in self._model.parameters()}
        self._own |= found
        return storage in found


# ---- to disk -----------------------------------------------------------------------------------------------------


class ToDisk(Mover):
    """Storages in a file."""

    def __init__(self, file: SwapFile, *, device: torch.device, how: Saving) -> None:
        self.file = file
        self.device = device
        self._room = _Room(how.staged)
        self._free: dict[int, list[int]] = defaultdict(list)
        self._lock = threading.Lock()
        self._used = 0

    def park(self, values: Tensor, *, before: Parked | None) -> Parked:
        """Raises TierError when the disk has no room."""
        size = values.numel()
        rounded = -(-size // BLOCK) * BLOCK
        offset = self._place(rounded)
        buffer = self._room.take(rounded, on=self.device)
        buffer[:size].copy_(values)
        written = self.file.write(offset, values=buffer)
        lent = [buffer]  # a transfer keeps what it calls, and must not keep the buffer
        del buffer
        written.then(lambda: self._room.give(lent.pop()))
        return _OnDisk(self, offset, written, size, before)

    def _place(self, size: int) -> int:
        with self._lock:
            self._used += size
            self.peak = max(self.peak, self._used)
            if self._free[size]:
                return self._free[size].pop()
        return self.file.place(self.file.allocate(size, dtype=torch.uint8))

    def close(self) -> None:
        """Give the file back."""
        self.file.close()

    def leave(self, offset: int, *, size: int) -> None:
        """A place in the file is free."""
        with self._lock:
            self._used -= size
            self._free[size].append(offset)


class _OnDisk(Parked):
    def __init__(self, tier: ToDisk, offset: int, written: Transfer, size: int, before: Parked | None) -> None:
        super().__init__(size, before=before)
        self._tier, self._offset, self._written = tier, offset, written
        self._buffer: Tensor | None = None
        self._read: Transfer | None = None
        self._back: Tensor | None = None

    def start(self) -> None:
        if self._read is None:
            self._written.wait()
            self._buffer = aligned(-(-self.size // BLOCK) * BLOCK, on=self._tier.device)
            self._read = self._tier.file.read(self._offset, into=self._buffer)

    def get(self) -> Tensor:
        self.start()
        if self._back is None:
            assert self._read is not None
            assert self._buffer is not None
            self._read.wait()
            self._back = self._buffer[: self.size].to(self._tier.device, non_blocking=True)
        return self._back

    def __del__(self) -> None:
        # What is under way to or from the place ends before another takes it.
        for transfer in (self._written, self._read):
            if transfer is not None:
                with contextlib.suppress(Exception):
                    transfer.wait()
        self._tier.leave(self._offset, size=-(-self.size // BLOCK) * BLOCK)


class _Room:
    """Aligned buffers of so many bytes in all; who wants more waits until some are given back."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._changed = threading.Condition()

    def take(self, size: int, *, on: torch.device) -> Tensor:
        """A buffer; one that is larger than all the room is alone in it."""
        with self._changed:
            while self._taken and self._taken + size > self._most:
                self._changed.wait()
            self._taken += size
            if self._free[size]:
                return self._free[size].pop()
            self._free = defaultdict(list, {key: kept for key, kept in self._free.items() if key == size})
        return aligned(size, on=on)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        with self._changed:
            self._taken -= buffer.numel()
            self._free[buffer.numel()].append(buffer)
            self._changed.notify_all()


# ---- to the CPU --------------------------------------------------------------------------------------------------


class ToCPU(Mover):
    """Storages of a GPU in pinned memory of the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = torch.cuda.Stream(device)
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._used = 0

    def park(self, values: Tensor, *, before: Parked | None) -> Parked:
        """The stream that computes does not wait: the copies' stream waits for it."""
        size = values.numel()
        self._used += size
        self.peak = max(self.peak, self._used)
        host = self._free[size].pop() if self._free[size] else torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):
            host.copy_(values, non_blocking=True)
        values.record_stream(self.copies)
        return _OnHost(self, host, before)

    def close(self) -> None:
        """Give the host's memory back."""
        self._free.clear()

    def leave(self, host: Tensor) -> None:
        """A buffer is free: what is copied into it later comes after what was copied out of it, on the same stream."""
        self._used -= host.numel()
        self._free[host.numel()].append(host)


class _OnHost(Parked):
    def __init__(self, tier: ToCPU, host: Tensor, before: Parked | None) -> None:
        super().__init__(host.numel(), before=before)
        self._tier, self._host = tier, host
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def start(self) -> None:
        if self._back is None:
            with torch.cuda.stream(self._tier.copies):
                self._back = self._host.to(self._tier.device, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record(self._tier.copies)

    def get(self) -> Tensor:
        self.start()
        assert self._back is not None
        assert self._arrived is not None
        current = torch.cuda.current_stream(self._tier.device)
        current.wait_event(self._arrived)
        self._back.record_stream(current)
        return self._back

    def __del__(self) -> None:
        self._tier.leave(self._host)


def activations(tier: str, *, device: torch.device, swap: Swap, how: Saving) -> Activations | None:
    """The tier that a plan names; None where activations stay: those of a CPU are on the CPU already.

    Raises TierError for a disk that cannot be written to.
    """
    if device.type == "meta" or tier == "device" or (tier == "cpu" and device.type == "cpu"):
        return None
    if tier == "cpu":
        return Activations(tier, mover=ToCPU(device), how=how)
    return Activations(tier, mover=ToDisk(SwapFile(swap.folder), device=device, how=how), how=how)

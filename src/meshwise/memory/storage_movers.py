"""Move storages to a file or to host memory, and back."""

import contextlib
import threading
from collections import defaultdict

import torch
from torch import Tensor

from meshwise.comm.api.streams import StreamEvent, streams_of
from meshwise.memory.parked_storage import ActivationTransfers, ParkedStorage, StorageMover
from meshwise.memory.swap_file import BLOCK, SwapFile, SwapTransfer, aligned

# ---- to disk -----------------------------------------------------------------------------------------------------


class DiskMover(StorageMover):
    """Storages in a file."""

    def __init__(self, file: SwapFile, *, device: torch.device, how: ActivationTransfers) -> None:
        self.file = file
        self.device = device
        self._room = _Room(how.staged)
        self._free: dict[int, list[int]] = defaultdict(list)
        self._lock = threading.Lock()
        self._used = 0

    def park(self, values: Tensor, *, before: ParkedStorage | None) -> ParkedStorage:
        """Move `values` to the file. Raises TierError when the disk has no room."""
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
        """Free a place in the file."""
        with self._lock:
            self._used -= size
            self._free[size].append(offset)


class _OnDisk(ParkedStorage):
    def __init__(
        self, tier: DiskMover, offset: int, written: SwapTransfer, size: int, before: ParkedStorage | None
    ) -> None:
        super().__init__(size, before=before)
        self._tier, self._offset, self._written = tier, offset, written
        self._buffer: Tensor | None = None
        self._read: SwapTransfer | None = None
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
        """Return a buffer; one that is larger than all the room is alone in it."""
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


class HostMover(StorageMover):
    """Storages of a GPU in pinned memory of the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = streams_of(device)
        self.copies = self.streams.create()
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._used = 0

    def park(self, values: Tensor, *, before: ParkedStorage | None) -> ParkedStorage:
        """Return the stream that computes does not wait: the copies' stream waits for it."""
        size = values.numel()
        self._used += size
        self.peak = max(self.peak, self._used)
        host = self._free[size].pop() if self._free[size] else self.streams.host_empty([size], dtype=torch.uint8)
        self.copies.wait_stream(self.streams.current())
        with self.streams.use(self.copies):
            host.copy_(values, non_blocking=True)
        self.streams.keep(values, stream=self.copies)
        return _OnHost(self, host, before)

    def close(self) -> None:
        """Give the host's memory back."""
        self._free.clear()

    def leave(self, host: Tensor) -> None:
        """Free a host buffer: later copies into it follow earlier copies out of it on the same stream."""
        self._used -= host.numel()
        self._free[host.numel()].append(host)


class _OnHost(ParkedStorage):
    def __init__(self, tier: HostMover, host: Tensor, before: ParkedStorage | None) -> None:
        super().__init__(host.numel(), before=before)
        self._tier, self._host = tier, host
        self._back: Tensor | None = None
        self._arrived: StreamEvent | None = None

    def start(self) -> None:
        if self._back is None:
            with self._tier.streams.use(self._tier.copies):
                self._back = self._host.to(self._tier.device, non_blocking=True)
                self._arrived = self._tier.streams.mark()

    def get(self) -> Tensor:
        self.start()
        assert self._back is not None
        assert self._arrived is not None
        current = self._tier.streams.current()
        current.wait_event(self._arrived)
        self._tier.streams.keep(self._back, stream=current)
        return self._back

    def __del__(self) -> None:
        self._tier.leave(self._host)

"""Store tensors in a file without a name, and move them between the file and memory on threads.

docs/memory.md says how tensors in the file are read and written, why the file has no name, and why its space is
reserved at an allocation ("Disk").

Reading ahead without a limit would hold the whole model in memory, and the tier `disk` would save nothing. So a read
or a write takes a buffer from a `BufferPool` of limited size. A buffer is free again when its content is written or no
longer needed. In a rehearsal, in which tensors have no values, a `RehearsedFile` replaces the file."""

import fcntl
import io
import mmap
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwise.comm.api.streams import Streams

BLOCK = 4096
"""Bytes of a block: direct reads and writes begin and end at multiples of this size, in the file and in memory."""

PIECE = 8 * 2**20
"""Most bytes that one thread moves in one call."""

SLAB = 64 * 2**20
"""Least bytes of pinned memory that `PinnedSlabs` allocates at once."""

REMEMBERED = 10_000
"""Number of last activities whose times are kept."""


class TierError(RuntimeError):
    """Error of a tier: it has no room for a tensor, a read or write failed, or an update ended half way."""


@dataclass(frozen=True)
class TierActivity:
    """A `read` or `write` of a piece, or an `update` of masters on the CPU (`kind`), with times of `time.monotonic`."""

    kind: str
    bytes: int
    started: float
    ended: float


class SwapTransfer:
    """Transfer between the swap file and memory, in pieces that threads move."""

    def __init__(self, futures: Sequence[Future[None]]) -> None:
        self._futures = futures

    @classmethod
    def of(cls, transfers: "Sequence[SwapTransfer]") -> "SwapTransfer":
        """Return several transfers as one, which ends when all of them have ended."""
        return cls([future for transfer in transfers for future in transfer._futures])

    @property
    def ended(self) -> bool:
        """True if all pieces have ended, even if some failed."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Wait until all pieces are moved. Raises TierError if a piece failed."""
        for future in self._futures:
            future.result()

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` once when all pieces have ended, even if some failed: on a thread of the file, or at once."""
        left = iter(self._futures)

        def await_next(_: object = None) -> None:
            for future in left:
                if not future.done():
                    future.add_done_callback(await_next)
                    return
            call()

        await_next()


class SwapFile:
    """File without a name that stores tensors, with threads that read and write it.

    | folder   folder of the file
    | size     bytes in use
    | direct   True if reads and writes bypass the page cache; file systems in memory and some others cannot do so
    | moved    the last reads and writes, oldest first"""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: None for the system's folder of temporary files. Raises TierError if no file can be made there."""
        self.folder = Path(tempfile.gettempdir()) if folder is None else folder
        try:
            self._file: io.FileIO = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise TierError(
                f"no swap file can be made in {self.folder}: {error.strerror}; name an existing, writable folder on a "
                "disk with room"
            ) from error
        self.size = 0
        self._offsets: dict[int, int] = {}
        self._room = torch.empty(0, dtype=torch.uint8)
        self.direct = self._go_direct()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="swap")
        self._end = weakref.finalize(self, _end, self._pool, self._file)
        self.moved: deque[TierActivity] = deque(maxlen=REMEMBERED)

    # ---- storage ----------------------------------------------------------------------------------------------

    def allocate(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros with one dim, stored in the file. Raises TierError if the disk has no room."""
        size = max(BLOCK, whole_blocks(numel * dtype.itemsize))
        self._reserve(size)
        if size > self._room.numel():  # a mapping keeps a file descriptor, so mappings are few and large
            mapped = max(size, self.size, 64 * 2**20)
            self._file.truncate(self.size + mapped)
            self._room = torch.frombuffer(mmap.mmap(self._file.fileno(), mapped, offset=self.size), dtype=torch.uint8)
            self._offsets[self._room.data_ptr()] = self.size
        tensor, self._room = self._room[: numel * dtype.itemsize].view(dtype), self._room[size:]
        self.size += size
        return tensor

    def locate(self, tensor: Tensor) -> int | None:
        """Return the offset in bytes of a tensor in the file, or None if the tensor is not stored in it."""
        if tensor.device.type != "cpu":
            return None
        base = tensor.untyped_storage().data_ptr()
        start = self._offsets.get(base)
        return None if start is None else start + tensor.data_ptr() - base

    def place(self, tensor: Tensor) -> int:
        """Return the offset in bytes of a tensor that is stored in the file."""
        offset = self.locate(tensor)
        assert offset is not None
        return offset

    # ---- moving ------------------------------------------------------------------------------------------------

    def read(self, offset: int, *, into: Tensor) -> SwapTransfer:
        """Start to fill `into` (uint8, aligned, whole blocks) from byte `offset` of the file on."""
        return self._move("read", os.preadv, offset, into)

    def write(self, offset: int, *, values: Tensor, after: Callable[[], None] = lambda: None) -> SwapTransfer:
        """Start to write `values` (uint8, aligned, whole blocks) to the file from byte `offset` on.

        `after` is called on the file's threads before they read `values`; it may wait until they are complete."""
        return self._move("write", os.pwritev, offset, values, after)

    def later(self, call: Callable[[], object]) -> None:
        """Call `call` on one of the file's threads, without waiting for it."""
        self._pool.submit(call)

    def close(self) -> None:
        """Wait until all transfers have ended, and close the file; tensors in it keep their values."""
        self._end()
        self._room = torch.empty(0, dtype=torch.uint8)

    def _move(
        self, kind: str, call: Callable[..., int], offset: int, memory: Tensor, after: Callable[[], None] = lambda: None
    ) -> SwapTransfer:
        assert memory.dtype == torch.uint8
        assert offset % BLOCK == memory.data_ptr() % BLOCK == memory.numel() % BLOCK == 0

        def move(start: int, piece: Tensor) -> None:
            after()
            begun, data = time.monotonic(), piece.numpy().data
            size = len(data)
            while data:
                try:
                    count = call(self._file.fileno(), [data], start)
                except OSError as error:
                    raise TierError(
                        f"cannot {kind} a tensor of the swap file in {self.folder}: {error.strerror}"
                    ) from error
                assert count > 0  # the file reaches to the end of its last region
                start, data = start + count, data[count:]
            self.moved.append(TierActivity(kind, size, begun, time.monotonic()))

        starts = range(0, memory.numel(), PIECE)
        return SwapTransfer([self._pool.submit(move, offset + low, memory[low : low + PIECE]) for low in starts])

    def _reserve(self, size: int) -> None:
        try:
            os.posix_fallocate(self._file.fileno(), self.size, size)
        except AttributeError:  # not on macOS: there a full disk shows when data is written
            return
        except OSError as error:
            free = shutil.disk_usage(self.folder).free if self.folder.exists() else 0
            raise TierError(
                f"{self.folder} has no room for the swap file: {error.strerror}; {size} bytes are needed besides the "
                f"{self.size} in use, and {free} are free. Name a folder on another disk, or offload less to disk"
            ) from error

    def _go_direct(self) -> bool:
        """Switch to direct reads and writes, and return True; return False if the file system has none."""
        file = self._file.fileno()
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        block = self.allocate(BLOCK, dtype=torch.uint8)
        with suppress(OSError, AttributeError):  # macOS has no such flag
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            # Some file systems accept the flag and refuse the write.
            os.pwritev(file, [aligned(BLOCK).numpy().data], self.place(block))
            return True
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False


class RehearsedFile(SwapFile):
    """Stand-in for a `SwapFile`: its tensors are on the meta device, and nothing is read or written."""

    def __init__(self) -> None:
        self.moved = deque(maxlen=0)
        self.tensors: list[Tensor] = []

    def allocate(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return a new meta tensor with one dim."""
        self.tensors.append(torch.empty(numel, dtype=dtype, device="meta"))
        return self.tensors[-1]

    def locate(self, tensor: Tensor) -> int | None:
        """Return 0 for a tensor allocated here or a view of it, and None for any other tensor."""
        storage = tensor.untyped_storage()._cdata
        return 0 if any(own.untyped_storage()._cdata == storage for own in self.tensors) else None

    def _move(self, *_: Any, **_options: Any) -> SwapTransfer:
        return SwapTransfer([])

    def later(self, call: Callable[[], object]) -> None:
        """Call `call` at once."""
        call()

    def close(self) -> None:
        """Do nothing: there is no file."""


def _end(pool: ThreadPoolExecutor, file: io.FileIO) -> None:
    pool.shutdown()
    file.close()


def whole_blocks(size: int) -> int:
    """Return `size` bytes rounded up to whole blocks of 4096 bytes."""
    return -(-size // BLOCK) * BLOCK


def aligned(size: int, *, streams: Streams | None = None) -> Tensor:
    """Return an uninitialized uint8 tensor of `size` bytes in host memory, aligned to blocks.

    It is pinned if `streams` belong to a GPU, and a meta tensor if they belong to meta. None: ordinary memory."""
    if streams is not None and streams.device.type == "cuda":
        raw = streams.host_empty([size], dtype=torch.uint8)
        if raw.data_ptr() % BLOCK == 0:  # room for a shift would double it: torch rounds up to a power of two
            return raw
        raw = streams.host_empty([size + BLOCK], dtype=torch.uint8)
    else:
        raw = torch.empty(size + BLOCK, dtype=torch.uint8, device="cpu" if streams is None else streams.device)
    start = -raw.data_ptr() % BLOCK
    return raw[start : start + size]


@dataclass(frozen=True)
class SwapConfig:
    """Configuration of the swap file and its staging buffers.

    | folder     folder of the file; None: the system's folder for temporary files
    | buffers    number of staging buffers of the update: one is read, one is updated, and one is written
    | buffer     bytes of each staging buffer; more if a single chunk does not fit"""

    folder: Path | None = None
    buffers: int = 3
    buffer: int = 64 * 2**20

    def __post_init__(self) -> None:
        if self.buffers < 2 or self.buffer < BLOCK:
            raise ValueError(
                f"{self.buffers} staging buffers of {self.buffer} bytes are too few or too small; give at least 2, of "
                f"at least {BLOCK} bytes"
            )


class PinnedSlabs:
    """Pinned memory that is cut from large pieces: torch rounds each allocation up to a power of two."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._rest = torch.empty(0, dtype=torch.uint8)

    def cut(self, size: int) -> Tensor:
        """Return `size` uninitialized bytes (uint8) that begin at a block; they are freed together with their slab."""
        room = whole_blocks(size)
        if room > self._rest.numel():
            self._rest = self._streams.host_empty([max(SLAB, 1 << (room - 1).bit_length())], dtype=torch.uint8)
        cut, self._rest = self._rest[:size], self._rest[room:]
        return cut


@dataclass(eq=False)
class BufferPool:
    """Pool of aligned buffers of at most `most` bytes in total. A larger buffer is lent only while no other is lent.

    `streams`: of the device that computes; for a GPU the buffers are pinned. `on_new_buffer` gets new buffers.
    `is_disk_slow`: make all buffers before one is used again, as if no write ended in time. Rehearsals do so."""

    most: int
    streams: Streams
    on_new_buffer: Callable[[Tensor], None] = lambda _: None
    is_disk_slow: bool = False
    bytes: int = field(default=0, init=False)
    """Bytes of all buffers, lent and free."""
    _lent: int = field(default=0, init=False)
    _free: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list), init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)

    def take(self, size: int) -> Tensor:
        """Return a buffer of `size` bytes; wait until enough buffers are given back."""
        with self._changed:
            while (buffer := self.take_now(size)) is None:
                self._changed.wait()
            return buffer

    def take_now(self, size: int) -> Tensor | None:
        """Return a buffer of `size` bytes, or None if there is none without waiting."""
        with self._changed:
            if self._lent and self._lent + size > self.most:
                return None
            self._lent += size
            if self._free[size] and not (self.is_disk_slow and self.bytes + size <= self.most):
                return self._free[size].pop()
            self._free = defaultdict(list, {size: self._free[size]})  # buffers of other sizes have to go
            self.bytes = self._lent + size * len(self._free[size])
            buffer = aligned(size, streams=self.streams)
            self.on_new_buffer(buffer)
            return buffer

    def give(self, buffer: Tensor) -> None:
        """Return `buffer` to the pool, and wake waiting calls of `take`."""
        with self._changed:
            self._lent -= buffer.numel()
            self._free[buffer.numel()].append(buffer)
            self._changed.notify_all()

"""A file that tensors rest in, and the threads that move them.

A tensor in the file is an ordinary tensor: a view of the file's mapping. Code that reads or fills it (a checkpoint, a
load, a user) needs no special call, and pays with page faults. Data that moves in every step bypasses the page cache,
in large aligned pieces. Several threads read and write them at once between the file and the caller's buffers; the
kernel keeps both ways coherent.

    file    | master            | exp_avg           | exp_avg_sq        |       reserved when it is asked for
            └── mapped: a tensor ┘        ▲ │
                                  write   │ │  read       pieces of 8 MiB, by a few threads
                                          │ ▼
    memory          a buffer, aligned like the file

The file has no name: it ends with the process, however that ends, and no other process can remove it. Its space is
reserved as it grows, so a full disk raises an error when a tensor is placed there, not when it is written to.
"""

import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwise.comm.api.streams import streams_of

BLOCK = 4096
"""Bytes: where direct reads and writes begin and end, in the file and in memory."""

PIECE = 8 * 2**20
"""Bytes that one thread moves at a time."""

THREADS = 4

REGION = 64 * 2**20
"""Bytes that are mapped together, at least."""

REMEMBERED = 10_000
"""Pieces of which the times are kept, the last ones."""


class TierError(RuntimeError):
    """A tier cannot take a tensor, or does not give it back as it was put there."""


@dataclass(frozen=True)
class MovedChunk:
    """One piece moved between memory and disk, or an update meanwhile; times by `time.monotonic`."""

    kind: str
    bytes: int
    started: float
    ended: float


class SwapTransfer:
    """Pieces under way."""

    def __init__(self, futures: Sequence[Future[None]]) -> None:
        self._futures = futures

    @classmethod
    def of(cls, transfers: "Sequence[SwapTransfer]") -> "SwapTransfer":
        """Several as one."""
        return cls([future for transfer in transfers for future in transfer._futures])

    def wait(self) -> None:
        """Return when all is moved. Raises TierError when a piece is not."""
        for future in self._futures:
            future.result()

    def then(self, call: Callable[[], None]) -> None:
        """Call once, on whatever thread ends the last piece, also when one came to nothing."""
        left = [len(self._futures)]
        lock = threading.Lock()

        def done(_: object) -> None:
            with lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                call()

        for future in self._futures:
            future.add_done_callback(done)
        if not self._futures:
            call()


class SwapFile:
    """A nameless file in `folder`, by default where the system keeps temporary files.

    Raises TierError when there is no such folder or nothing can be written there. `direct` says whether reads and
    writes go past the page cache; some file systems, those in memory among them, do not have that.
    """

    def __init__(self, folder: Path | None = None, *, threads: int = THREADS) -> None:
        self.folder = Path(tempfile.gettempdir()) if folder is None else folder
        try:
            self._file = _nameless(self.folder)
        except OSError as error:
            raise TierError(
                f"no swap file can be made in {self.folder}: {error.strerror}; name an existing, writable folder on a "
                "disk with room"
            ) from error
        self.size = 0
        self._offsets: dict[int, int] = {}
        self._room = torch.empty(0, dtype=torch.uint8)
        self.direct = self._go_direct()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="swap")
        self.moved: deque[MovedChunk] = deque(maxlen=REMEMBERED)

    # ---- tensors at rest ---------------------------------------------------------------------------------------

    def allocate(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return a tensor in one dim that rests in the file, all zero. Raises TierError when the disk has no room for
        it.
        """
        size = max(1, -(-numel * dtype.itemsize // BLOCK)) * BLOCK
        self._reserve(size)
        if size > self._room.numel():
            try:
                self._map(max(size, self.size, REGION))
            except OSError:  # a process may be limited in how long its files are, or in what it maps
                self._map(size)
        tensor, self._room = self._room[: numel * dtype.itemsize].view(dtype), self._room[size:]
        self.size += size
        return tensor

    def locate(self, tensor: Tensor) -> int | None:
        """Return where the first element of a tensor rests in the file, or None if it does not rest here."""
        if tensor.device.type != "cpu":
            return None
        base = tensor.untyped_storage().data_ptr()
        start = self._offsets.get(base)
        return None if start is None else start + tensor.data_ptr() - base

    def place(self, tensor: Tensor) -> int:
        """Return the same for one that does."""
        offset = self.locate(tensor)
        assert offset is not None
        return offset

    # ---- moving ------------------------------------------------------------------------------------------------

    def read(self, offset: int, *, into: Tensor) -> SwapTransfer:
        """Start to fill bytes of memory, aligned and of whole blocks, from the file."""
        return self._move("read", os.preadv, offset, into)

    def write(self, offset: int, *, values: Tensor) -> SwapTransfer:
        """Start to write bytes of memory, aligned and of whole blocks, to the file."""
        return self._move("write", os.pwritev, offset, values)

    def later(self, call: Callable[[], object]) -> None:
        """Call on one of the threads."""
        self._pool.submit(call)

    def close(self) -> None:
        """Give the file back, when what is under way has ended; tensors that rest there keep their values."""
        if self._file >= 0:
            self._pool.shutdown()
            os.close(self._file)
            self._file, self._room = -1, torch.empty(0, dtype=torch.uint8)

    def _move(self, kind: str, call: Callable[..., int], offset: int, memory: Tensor) -> SwapTransfer:
        assert memory.dtype == torch.uint8
        assert offset % BLOCK == memory.data_ptr() % BLOCK == memory.numel() % BLOCK == 0

        def move(start: int, data: memoryview) -> None:
            begun = time.monotonic()
            size = len(data)
            while data:
                try:
                    count = call(self._file, [data], start)
                except OSError as error:
                    raise TierError(
                        f"cannot {kind} a tensor of the swap file in {self.folder}: {error.strerror}"
                    ) from error
                if count == 0:
                    raise TierError(
                        f"the swap file in {self.folder} ends at byte {start}, before {len(data)} bytes that were "
                        "written: another process has cut it; load a checkpoint to continue"
                    )
                start, data = start + count, data[count:]
            self.moved.append(MovedChunk(kind, size, begun, time.monotonic()))

        data = memory.numpy().data
        return SwapTransfer(
            [self._pool.submit(move, offset + low, data[low : low + PIECE]) for low in range(0, len(data), PIECE)]
        )

    def _map(self, size: int) -> None:
        """Map so many bytes after those in use. Each mapping keeps a descriptor, so there are few, ever larger ones."""
        os.ftruncate(self._file, self.size + size)
        self._room = torch.frombuffer(mmap.mmap(self._file, size, offset=self.size), dtype=torch.uint8)
        self._offsets[self._room.data_ptr()] = self.size

    def _reserve(self, size: int) -> None:
        try:
            os.posix_fallocate(self._file, self.size, size)
        except AttributeError:  # macOS has none: a full disk is told when it is written to
            return
        except OSError as error:
            free = shutil.disk_usage(self.folder).free if self.folder.exists() else 0
            raise TierError(
                f"{self.folder} has no room for the swap file: {error.strerror}; {size} bytes are needed besides the "
                f"{self.size} there, and {free} are free. Name a folder on another disk, or offload less to disk"
            ) from error

    def _go_direct(self) -> bool:
        """Open the way past the page cache; False where the file system has none."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        block = self.allocate(BLOCK, dtype=torch.uint8)
        with suppress(OSError, AttributeError):  # macOS has no such flag
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
            # Some take the flag and refuse the write.
            os.pwritev(self._file, [aligned(BLOCK).numpy().data], self.locate(block) or 0)
            return True
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
        return False


def aligned(size: int, *, on: torch.device | None = None) -> Tensor:
    """Return bytes of memory that begin where a direct read may; `on` a GPU: pinned, for copies to and from it."""
    if on is not None and on.type == "meta":
        raw = torch.empty(size + BLOCK, dtype=torch.uint8, device="meta")
    else:
        raw = streams_of(on or torch.device("cpu")).host_empty([size + BLOCK], dtype=torch.uint8)
    start = -raw.data_ptr() % BLOCK
    return raw[start : start + size]


def traffic(moved: Sequence[MovedChunk]) -> Iterator[tuple[str, int, float]]:
    """(kind, bytes, seconds in which something of this kind was under way) of reads, of writes and of both."""
    moved = [one for one in moved if one.kind in ("read", "write")]
    for kind in ("read", "write", "both"):
        own = sorted((one.started, one.ended) for one in moved if kind in (one.kind, "both"))
        busy, until = 0.0, float("-inf")
        for started, ended in own:
            busy += max(0.0, ended - max(started, until))
            until = max(until, ended)
        yield kind, sum(one.bytes for one in moved if kind in (one.kind, "both")), busy


def _nameless(folder: Path) -> int:
    """Return a file for reading and writing that no folder lists."""
    with suppress(IsADirectoryError, NotImplementedError, AttributeError):  # macOS has no such flag
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (95, 22):  # EOPNOTSUPP, EINVAL: this file system makes no file without a name
                raise
    descriptor, path = tempfile.mkstemp(prefix="meshwise-", dir=folder)
    Path(path).unlink()
    return descriptor

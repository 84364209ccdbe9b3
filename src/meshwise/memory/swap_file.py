"""Store tensors in a file without a name, and move them between the file and memory on threads.

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
import io
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwise.comm.api.streams import streams_of

BLOCK = 4096
"""Bytes: direct reads and writes begin and end at multiples of this, in the file and in memory."""

PIECE = 8 * 2**20
"""Bytes that one thread moves at a time."""

THREADS = 4

REGION = 64 * 2**20
"""Least bytes of one mapping."""

REMEMBERED = 10_000
"""Number of the last pieces whose times are kept."""


_CPU = torch.device("cpu")


class TierError(RuntimeError):
    """A tier has no room for a tensor, or a read or write of it failed."""


@dataclass(frozen=True)
class MovedChunk:
    """One piece moved between memory and disk, or one update on the CPU; times by `time.monotonic`."""

    kind: str
    bytes: int
    started: float
    ended: float


class SwapTransfer:
    """Pieces on their way between a file and memory."""

    def __init__(self, futures: Sequence[Future[None]]) -> None:
        self._futures = futures

    @classmethod
    def of(cls, transfers: "Sequence[SwapTransfer]") -> "SwapTransfer":
        """Return one transfer that ends with the last of several."""
        return cls([future for transfer in transfers for future in transfer._futures])

    def wait(self) -> None:
        """Wait until all pieces are moved. Raises TierError when one failed."""
        for future in self._futures:
            future.result()

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` once when the last piece has ended, even if it failed, on the thread that ended it."""
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

    def __init__(self, folder: Path | None = None) -> None:
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
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="swap")
        self.moved: deque[MovedChunk] = deque(maxlen=REMEMBERED)

    # ---- storage ----------------------------------------------------------------------------------------------

    def allocate(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in one dim, stored in the file. Raises TierError when the disk has no room."""
        size = max(BLOCK, whole_blocks(numel * dtype.itemsize))
        self._reserve(size)
        if size > self._room.numel():
            self._map(max(size, self.size, REGION))
        tensor, self._room = self._room[: numel * dtype.itemsize].view(dtype), self._room[size:]
        self.size += size
        return tensor

    def locate(self, tensor: Tensor) -> int | None:
        """Return the byte of the file at which a tensor begins, or None if it is not stored here."""
        if tensor.device.type != "cpu":
            return None
        base = tensor.untyped_storage().data_ptr()
        start = self._offsets.get(base)
        return None if start is None else start + tensor.data_ptr() - base

    def place(self, tensor: Tensor) -> int:
        """Return the byte of the file at which a tensor begins that is stored here."""
        offset = self.locate(tensor)
        assert offset is not None
        return offset

    # ---- moving ------------------------------------------------------------------------------------------------

    def read(self, offset: int, *, into: Tensor) -> SwapTransfer:
        """Start to fill `into`, aligned and of whole blocks, from byte `offset` of the file on."""
        return self._move("read", os.preadv, offset, into)

    def write(self, offset: int, *, values: Tensor) -> SwapTransfer:
        """Start to write `values`, aligned and of whole blocks, to the file from byte `offset` on."""
        return self._move("write", os.pwritev, offset, values)

    def later(self, call: Callable[[], object]) -> None:
        """Call `call` on one of the threads."""
        self._pool.submit(call)

    def close(self) -> None:
        """Close the file when its transfers have ended; tensors in it keep their values."""
        if not self._file.closed:
            self._pool.shutdown()
            self._file.close()
            self._room = torch.empty(0, dtype=torch.uint8)

    def _move(self, kind: str, call: Callable[..., int], offset: int, memory: Tensor) -> SwapTransfer:
        assert memory.dtype == torch.uint8
        assert offset % BLOCK == memory.data_ptr() % BLOCK == memory.numel() % BLOCK == 0

        def move(start: int, data: memoryview) -> None:
            begun = time.monotonic()
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
            self.moved.append(MovedChunk(kind, size, begun, time.monotonic()))

        data = memory.numpy().data
        return SwapTransfer(
            [self._pool.submit(move, offset + low, data[low : low + PIECE]) for low in range(0, len(data), PIECE)]
        )

    def _map(self, size: int) -> None:
        """Map `size` bytes after those in use. Each mapping keeps a descriptor, so there are few, ever larger ones."""
        self._file.truncate(self.size + size)
        region = mmap.mmap(self._file.fileno(), size, offset=self.size)
        self._room = torch.frombuffer(region, dtype=torch.uint8)
        self._offsets[self._room.data_ptr()] = self.size

    def _reserve(self, size: int) -> None:
        try:
            os.posix_fallocate(self._file.fileno(), self.size, size)
        except AttributeError:  # macOS has none: a full disk is found when it is written to
            return
        except OSError as error:
            free = shutil.disk_usage(self.folder).free if self.folder.exists() else 0
            raise TierError(
                f"{self.folder} has no room for the swap file: {error.strerror}; {size} bytes are needed besides the "
                f"{self.size} there, and {free} are free. Name a folder on another disk, or offload less to disk"
            ) from error

    def _go_direct(self) -> bool:
        """Switch to direct reads and writes; return False where the file system has none."""
        file = self._file.fileno()
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        block = self.allocate(BLOCK, dtype=torch.uint8)
        with suppress(OSError, AttributeError):  # macOS has no such flag
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            # Some file systems take the flag and refuse the write.
            os.pwritev(file, [aligned(BLOCK).numpy().data], self.place(block))
            return True
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False


def whole_blocks(size: int) -> int:
    """Return the bytes of the whole blocks that hold `size` bytes."""
    return -(-size // BLOCK) * BLOCK


def aligned(size: int, *, device: torch.device = _CPU) -> Tensor:
    """Return `size` bytes that begin where a direct read may. They are pinned where `device` is a GPU."""
    if device.type == "meta":
        raw = torch.empty(size + BLOCK, dtype=torch.uint8, device="meta")
    else:
        raw = streams_of(device).host_empty([size + BLOCK], dtype=torch.uint8)
    start = -raw.data_ptr() % BLOCK
    return raw[start : start + size]

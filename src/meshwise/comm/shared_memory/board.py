"""Publish the counters of one rank in shared memory that only this rank writes and all ranks of its host read.

A word is an integer of 8 bytes, read and written in one piece. So a rank counts its finished calls without a lock:

    | word    0     the bell: other ranks sleep on it (as on a futex) until this rank changes its value
    |         8     number of queues
    |         16…   for each queue: its key, and the index of its first word
    |         …     the queues, each at a multiple of `PAYLOAD_WORDS` (`queue_state` describes their contents)

A waiting rank first polls a few times, because the other rank may be about to post. Next it yields the core between
polls, because the other rank may need this core. Last it sleeps until the other rank's bell rings. So the wait keeps no
core busy, whatever the number of ranks. A barrier of 4 ranks on 4 busy cores takes 30 us, of 8 ranks 100 us. With
polling alone the barriers take 1 ms and 3 ms.

A rank that has read a counter must see everything that was written before the counter. x86 always keeps this order.
On other processors a lock is taken and released in between, because reads and writes are never moved across a lock."""

import ctypes
import platform
import resource
import threading
import time
from functools import lru_cache, partial

import torch
from torch import Tensor

from meshwise.comm.shared_memory.segment import SharedSegment, open_segment, words_of

PAYLOAD_BYTES = 64 << 10
"""Room on the board for the tensors of one call, in bytes. Other ranks read larger tensors in place."""

PAYLOAD_WORDS = PAYLOAD_BYTES // 8
"""Words of one payload. Queues and payloads begin at multiples of this number."""

# Bytes of address space of a board. A queue uses about 2 MB of memory, supplied by the system at its first use. Every
# rank maps the board of every other rank, so boards are smaller where address space is limited (`ulimit -v`).
_BYTES, _BYTES_OF_FEW = 1 << 32, 1 << 30
_NUM_QUEUES, _TABLE, _MOST_QUEUES = 8, 16, 2000
_FIRST_QUEUE = _TABLE + 2 * _MOST_QUEUES

_MOST_VIEWS = 4096

_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
_WAIT, _WAKE, _EVERYBODY = 0, 1, 1 << 30
_NAP_SECONDS = 100e-6  # where there is no futex to sleep on
_syscall = ctypes.CDLL(None).syscall


class _Span(ctypes.Structure):
    """C's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Board:
    """Shared memory with the counters, queues and small tensors of one rank, its owner. Only the owner writes there."""

    def __init__(self, memory: Tensor, *, place: int, segment: SharedSegment | None = None) -> None:
        """Use the bytes `memory`. place: `SharedSegment.place`. segment: None in processes other than the owner's."""
        self.place = place
        self._segment = segment
        self.bytes = memory
        self.words = words_of(memory)
        self.address = memory.data_ptr()
        self.view = lru_cache(maxsize=_MOST_VIEWS)(partial(_view, memory))
        """Function (offset, bytes, dtype) → tensor over these bytes. Cached, because payloads often repeat offsets."""
        self._bell = ctypes.c_void_p(self.address)
        self._lock = threading.Lock()
        self._queues: dict[int, int] = {}
        self._end = _FIRST_QUEUE

    @classmethod
    def make(cls) -> "Board":
        """Return a new board, owned by this rank. Raises OSError when the system refuses shared memory."""
        few = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        segment = SharedSegment.make(0, size=_BYTES_OF_FEW if few else _BYTES)
        return cls(segment.memory, place=segment.place, segment=segment)

    @classmethod
    def open(cls, process: int, *, place: int) -> "Board":
        """Map the board of another rank, and return it. process: PID of the other rank. place: `Board.place` of the
        board in that process. Raises OSError when the board cannot be mapped."""
        return cls(open_segment(process, place=place), place=place)

    def hide(self) -> None:
        """Close the file descriptor of this rank's board. No further process can map it; existing mappings stay."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    # ---- queues -------------------------------------------------------------------------------------------------

    def add_queue(self, key: int, *, words: int) -> int:
        """Reserve `words` words for the queue `key` on this rank's board, and return the index of the first word."""
        count, start = self.words[_NUM_QUEUES], -(-self._end // PAYLOAD_WORDS) * PAYLOAD_WORDS
        assert count < _MOST_QUEUES, "the board is full of queues"
        assert start + words <= len(self.words), "the board is full of queues"
        self._end = start + words
        self.words[_TABLE + 2 * count] = key
        self.words[_TABLE + 2 * count + 1] = start
        self.publish(_NUM_QUEUES, value=count + 1)
        self._queues[key] = start
        return start

    def queue_start(self, key: int) -> int | None:
        """Return the index of the first word of queue `key`, or None before the owner's first call in this queue."""
        if key not in self._queues:
            for at in range(len(self._queues), self.read(_NUM_QUEUES)):
                self._queues[self.words[_TABLE + 2 * at]] = self.words[_TABLE + 2 * at + 1]
        return self._queues.get(key)

    # ---- counters ----------------------------------------------------------------------------------------------

    def publish(self, word: int, *, value: int) -> None:
        """Write a counter. A rank that reads the new value also sees everything that this rank wrote before."""
        if not _KEEPS_ORDER:
            self._order()
        self.words[word] = value

    def read(self, word: int) -> int:
        """Return a counter. Afterwards this rank sees everything that the owner wrote before the counter."""
        value = self.words[word]
        if not _KEEPS_ORDER:
            self._order()
        return value

    def _order(self) -> None:
        for _ in range(2):
            with self._lock:
                pass

    # ---- sleeping and waking -----------------------------------------------------------------------------------

    @property
    def bell(self) -> int:
        """Number that every `ring` changes."""
        return self.words[0]

    def ring(self) -> None:
        """Change the bell, and wake the ranks that sleep on this board."""
        self.words[0] = (self.words[0] + 1) & 0x7FFFFFFF
        if _FUTEX is not None:
            _syscall(_FUTEX, self._bell, _WAKE, _EVERYBODY)

    def sleep(self, seen: int, *, seconds: float) -> None:
        """Sleep until the bell differs from `seen`, at most for `seconds`. The sleep may also end earlier."""
        if _FUTEX is None:
            time.sleep(min(_NAP_SECONDS, seconds))
        elif self.words[0] == seen:
            most = _Span(int(seconds), int(seconds % 1 * 1e9))
            _syscall(_FUTEX, self._bell, _WAIT, ctypes.c_int(seen), ctypes.byref(most), None, 0)


def _view(memory: Tensor, offset: int, size: int, dtype: torch.dtype) -> Tensor:
    return memory[offset : offset + size].view(dtype)

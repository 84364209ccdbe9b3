"""Publish numbers of one rank to the others of its host, in a page that it alone writes and all of them read.

A number of 8 aligned bytes is written at once, so a rank that counts up what it has done needs no lock:

    | words   0     the bell: changes with everything else, and is what the others sleep on (a futex)
    |         8     how many queues there are
    |         16…   for each queue: its key, and where it begins
    |         …     the queues, in pages (`queue_state` describes them)

A waiting rank first polls a few times, for a rank that is about to arrive. Then it yields the core between polls, for a
rank that needs the same core. Then it sleeps until the other rank's bell rings. No core is kept busy, with any number
of ranks: a barrier of 4 ranks on 4 busy cores takes 30 us, of 8 ranks 100 us. Spinning takes 1 ms and 3 ms.

A rank that has read a count sees everything written before that count. x86 keeps that order without help. On other
machines a lock is taken and released in between: the processor moves no reads or writes across it.
"""

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
"""Up to so many bytes travel in the board itself."""

PAGE_WORDS = PAYLOAD_BYTES // 8

# Bytes of addresses, about 2 MB for each queue; memory is taken page by page, as queues are used. Every rank maps the
# board of every other rank, so boards are smaller where addresses are limited (`ulimit -v`).
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
    """Board of one rank, as its owner or another rank maps it."""

    def __init__(self, memory: Tensor, *, place: int, segment: SharedSegment | None = None) -> None:
        """`segment`: the owner's shared segment."""
        self.place = place
        self._segment = segment
        self.bytes = memory
        self.words = words_of(memory)
        self.address = memory.data_ptr()
        self.view = lru_cache(maxsize=_MOST_VIEWS)(partial(_view, memory))
        """Tensor of `size` bytes at an offset, in a dtype; cached, because payloads use the same places often."""
        self._bell = ctypes.c_void_p(self.address)
        self._lock = threading.Lock()
        self._queues: dict[int, int] = {}
        self._end = _FIRST_QUEUE

    @classmethod
    def make(cls) -> "Board":
        """Return a new board of this rank. Raises OSError when the system has no memory to share."""
        few = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        segment = SharedSegment.make(0, size=_BYTES_OF_FEW if few else _BYTES)
        return cls(segment.memory, place=segment.place, segment=segment)

    @classmethod
    def open(cls, process: int, *, place: int) -> "Board":
        """Map the board of another rank. Raises OSError when it cannot be mapped."""
        return cls(open_segment(process, place=place), place=place)

    def hide(self) -> None:
        """Hide this rank's board from further ranks; ranks that have mapped it still read it."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    # ---- queues -------------------------------------------------------------------------------------------------

    def add_queue(self, key: int, *, words: int) -> int:
        """Add a queue of `words` words, and return the word at which it begins."""
        count, start = self.words[_NUM_QUEUES], _round(self._end)
        assert count < _MOST_QUEUES, "the board is full of queues"
        assert start + words <= len(self.words), "the board is full of queues"
        self._end = start + words
        self.words[_TABLE + 2 * count] = key
        self.words[_TABLE + 2 * count + 1] = start
        self.publish(_NUM_QUEUES, value=count + 1)
        self._queues[key] = start
        return start

    def queue_start(self, key: int) -> int | None:
        """Return the word at which a queue begins, or None before its owner's first call in it."""
        if key not in self._queues:
            for at in range(len(self._queues), self.read(_NUM_QUEUES)):
                self._queues[self.words[_TABLE + 2 * at]] = self.words[_TABLE + 2 * at + 1]
        return self._queues.get(key)

    # ---- numbers -----------------------------------------------------------------------------------------------

    def publish(self, word: int, *, value: int) -> None:
        """Write a number, after everything that was written before."""
        if not _KEEPS_ORDER:
            self._order()
        self.words[word] = value

    def read(self, word: int) -> int:
        """Read a number; everything that its owner wrote before it is visible afterwards."""
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
        """A number that changes with every ring."""
        return self.words[0]

    def ring(self) -> None:
        """Wake the ranks that sleep on this board."""
        self.words[0] = (self.words[0] + 1) & 0x7FFFFFFF
        if _FUTEX is not None:
            _syscall(_FUTEX, self._bell, _WAKE, _EVERYBODY)

    def sleep(self, seen: int, *, seconds: float) -> None:
        """Sleep until the bell differs from `seen`, at most for `seconds`; the sleep may also end earlier."""
        if _FUTEX is None:
            time.sleep(min(_NAP_SECONDS, seconds))
        elif self.words[0] == seen:
            most = _Span(int(seconds), int(seconds % 1 * 1e9))
            _syscall(_FUTEX, self._bell, _WAIT, ctypes.c_int(seen), ctypes.byref(most), None, 0)


def _view(memory: Tensor, offset: int, size: int, dtype: torch.dtype) -> Tensor:
    return memory[offset : offset + size].view(dtype)


def _round(words: int) -> int:
    return -(-words // PAGE_WORDS) * PAGE_WORDS

"""Create and map memory that the processes of one host share.

Memory with a name (/dev/shm, System V) outlives a process that is killed, and containers often give 64 MB of it. A
memfd has no name: the machine's memory is its only limit, and it ends with the last process that maps it. Others reach
it through /proc/PID/fd, and check its label.

    owner   memfd 7 "meshwise-3"  ──► mmap ──► a tensor whose storage is the mapping
    peer    /proc/OWNER/fd/7      ──► mmap ──► the same bytes, as a tensor

Making and mapping cost a page fault every 4 KB. So an empty slab is reused for the next one of about its size; the last
two are kept for that.
"""

import contextlib
import ctypes
import itertools
import mmap
import os
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_LABEL = "meshwise-"
_FD_BITS = 20
KEPT = 2
"""Number of free slabs that are kept for reuse."""
_MOST = 256
_CLOSED_ON_EXEC = 1
_NAMES = 2**63 - 1  # the largest number of a word on a board
# madvise: free the pages for everyone who maps them; take the page faults now, as for reading or for writing.
_REMOVE, _POPULATE_READ, _POPULATE_WRITE = 9, 22, 23
_C = ctypes.CDLL(None, use_errno=True)


@dataclass(eq=False)
class SharedSegment:
    """Shared memory that this process made, as bytes. `place` is how the others find it."""

    memory: Tensor
    place: int
    lease: weakref.ref[memoryview] | None = None

    @classmethod
    def make(cls, number: int, *, size: int) -> "SharedSegment":
        """Return new memory of `size` bytes, zero where nothing was written. Raises OSError when the system refuses."""
        fd = _memfd(f"{_LABEL}{number}")
        place = number << _FD_BITS | fd
        try:
            os.ftruncate(fd, size)
            return cls(open_segment(os.getpid(), place=place), place)
        except OSError:
            os.close(fd)
            raise

    def discard(self) -> None:
        """Return the memory to the system, even while other processes map it."""
        _advise(self.memory, _REMOVE)
        self.close()

    def close(self) -> None:
        """Hide it from further processes; it lasts as long as one maps it."""
        os.close(self.place & (1 << _FD_BITS) - 1)


def _memfd(label: str) -> int:
    """Return a file descriptor of os.memfd_create, also for Python builds that lack it (conda's, uv's)."""
    create = getattr(_C, "memfd_create", None)
    if sys.platform != "linux" or create is None:
        raise OSError(f"{sys.platform} has no memfd")
    fd: int = create(label.encode(), _CLOSED_ON_EXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"memfd: {os.strerror(ctypes.get_errno())}")
    return fd


def open_segment(process: int, *, place: int) -> Tensor:
    """Map a segment of another process, as bytes. Raises OSError when it is not there, or cannot be opened."""
    path = _path(process, place)
    if not _is_there(process, place):
        raise OSError(f"{path} is not the memory that was announced")
    try:
        with torch.inference_mode(mode=False):  # or nobody could write to it outside of that
            return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"cannot map {path}: {error}") from error


def _path(process: int, place: int) -> Path:
    return Path(f"/proc/{process}/fd/{place & (1 << _FD_BITS) - 1}")


def _is_there(process: int, place: int) -> bool:
    try:
        return str(_path(process, place).readlink()).startswith(f"/memfd:{_LABEL}{place >> _FD_BITS} ")
    except OSError:
        return False


def words_of(memory: Tensor) -> memoryview:
    """Return a view of `memory` as numbers of 8 bytes, each read and written at once."""
    return memoryview(memory.numpy()).cast("q")  # type: ignore[arg-type] # an array is a buffer


def fits(size: int, *, slab: int) -> bool:
    """Return whether a slab of `slab` bytes is lent to a tensor of `size`."""
    return size <= slab <= size + size // 4 + _PAGE


class TensorSlabs:
    """The shared memory of one rank's tensors."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        self._lent: dict[int, SharedSegment] = {}
        self._free: list[SharedSegment] = []
        self._kept = KEPT

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return a tensor in shared memory with unspecified contents; its memory is reused after its last view.

        Each slab needs a file descriptor, and a process has about a thousand. So with 256 slabs in use the tensor
        lies in ordinary memory. A forked copy of the process gets ordinary memory too: the slabs are the rank's.
        """
        if len(self._lent) < _MOST and os.getpid() == self._process:
            with contextlib.suppress(OSError):
                return self.lend(numel, dtype=dtype)
        return torch.empty(numel, dtype=dtype)

    def lend(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return a tensor in shared memory, however many slabs are in use. Raises OSError when the system refuses."""
        size = max(1, numel * dtype.itemsize)
        slab = self._fitting(size)
        if slab is None:
            slab = self.make(size)
            _advise(slab.memory, _POPULATE_WRITE)
        lease = memoryview(slab.memory.numpy())  # type: ignore[arg-type] # an array is a buffer
        address = slab.memory.data_ptr()
        self._lent[address] = slab
        slab.lease = weakref.ref(lease, lambda _: self._give_back(address))
        return torch.frombuffer(lease, dtype=torch.uint8, count=size)[: numel * dtype.itemsize].view(dtype)

    def make(self, size: int) -> SharedSegment:
        """Return new memory of whole pages, not managed here. Raises OSError when the system refuses."""
        return SharedSegment.make(next(self._numbers), size=-(-size // _PAGE) * _PAGE)

    def locate(self, x: Tensor) -> tuple[int, int] | None:
        """Return the place and the offset in bytes of a tensor in this memory; None for any other tensor."""
        start = x.untyped_storage().data_ptr()
        slab = self._lent.get(start)
        return None if slab is None else (slab.place, x.data_ptr() - start)

    def _fitting(self, size: int) -> SharedSegment | None:
        """Take the smallest free slab that fits `size` bytes, or return None. Garbage collection may discard free slabs
        meanwhile.
        """
        for slab in sorted(self._free, key=lambda slab: slab.memory.numel()):
            if fits(size, slab=slab.memory.numel()):
                with contextlib.suppress(ValueError):
                    self._free.remove(slab)
                    return slab
        return None

    def _give_back(self, address: int) -> None:
        if os.getpid() != self._process:
            return  # a forked copy: the rank still uses the memory
        self._free.append(self._lent.pop(address))
        self._discard(self._kept)

    def keep_none(self) -> None:
        """Return free slabs to the system, now and later."""
        self._kept = 0
        self._discard(0)

    def _discard(self, most: int) -> None:
        with contextlib.suppress(IndexError):  # garbage collection may call this function again meanwhile
            while len(self._free) > most:
                self._free.pop(0).discard()


class JointTensors:
    """The joint tensors of this rank, and the ranks that share each of them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, ...], int]] = {}
        """By address: the ranks that share the tensor, and its number among the joint tensors of these ranks."""
        self._leases: dict[int, weakref.ref[memoryview]] = {}
        self._counts: Counter[tuple[int, ...]] = Counter()

    def add(self, memory: Tensor, *, ranks: tuple[int, ...]) -> Tensor:
        """Register a joint tensor of `ranks`, and return a view of it; the entry goes with the last view."""
        lease = memoryview(memory.numpy())  # type: ignore[arg-type] # an array is a buffer
        address = memory.data_ptr()
        self._counts[ranks] += 1
        self._known[address] = ranks, self._counts[ranks]
        self._leases[address] = weakref.ref(lease, lambda _: self._forget(address))
        return torch.frombuffer(lease, dtype=torch.uint8)

    def name(self, tensors: Sequence[Tensor], *, ranks: tuple[int, ...]) -> int:
        """Return a number that names the memory of these tensors on every rank; 0 unless all of it is joint tensors of
        exactly these ranks.
        """
        if not self._known:
            return 0
        where: list[int] = []
        for x in tensors:
            start = x.untyped_storage().data_ptr()
            holders, number = self._known.get(start, ((), 0))
            if holders != ranks:
                return 0
            where += number, x.data_ptr() - start, x.nbytes
        return hash(tuple(where)) & _NAMES | 1  # integers have the same hash in every process

    def _forget(self, address: int) -> None:
        del self._known[address], self._leases[address]


class PeerMappings:
    """The mapped slabs of another process."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._mapped: dict[int, Tensor] = {}

    def at(self, place: int) -> Tensor:
        """Return the bytes of a slab. Raises OSError when it cannot be mapped."""
        if place not in self._mapped:
            self._mapped = {known: x for known, x in self._mapped.items() if _is_there(self._process, known)}
            self._mapped[place] = self.map(place)
            _advise(self._mapped[place], _POPULATE_READ)
        return self._mapped[place]

    def map(self, place: int) -> Tensor:
        """Return the mapped segment, for a caller that keeps it."""
        return open_segment(self._process, place=place)


def _advise(memory: Tensor, how: int) -> None:
    """Advise the kernel about memory; kernels that do not know the advice (populate: before Linux 5.14) refuse it."""
    _C.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), how)

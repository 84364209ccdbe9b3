"""Create and map memory that the processes of one host share, and lend it as tensors.

Memory with a name (/dev/shm, System V) outlives a killed process, and containers often limit it to 64 MB. A memfd has
no name: it is limited by the machine's memory only, and is freed with the last process that maps it. Other processes
open a memfd through /proc/PID/fd, and check its label.

    owner   memfd 7 "meshwise-3"  ──► mmap ──► a tensor whose storage is the mapping
    peer    /proc/OWNER/fd/7      ──► mmap ──► the same bytes, as a tensor

A new mapping costs a page fault every 4 KB. So the segments of tensors, called slabs, are reused for tensors of
similar size, and for smaller tensors of one call; two unused slabs are kept for this."""

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
"""Number of unused slabs that are kept for reuse."""
_CLOSED_ON_EXEC = 1
_NAMES = 2**63 - 1  # the largest signed 8-byte integer, in which `JointTensors.name` is sent
# Advice for madvise. REMOVE frees the pages in all processes. POPULATE makes the page faults happen now.
_REMOVE, _POPULATE_READ, _POPULATE_WRITE = 9, 22, 23
_C = ctypes.CDLL(None, use_errno=True)


@dataclass(eq=False)
class SharedSegment:
    """Shared memory that this process made."""

    memory: Tensor
    """The bytes of the segment, as a uint8 tensor."""
    place: int
    """Number by which other processes find the segment; it combines its label and its file descriptor."""

    @classmethod
    def make(cls, number: int, *, size: int) -> "SharedSegment":
        """Return segment `number` of this process: `size` zero bytes. Raises OSError when the system refuses."""
        fd = _memfd(f"{_LABEL}{number}")
        place = number << _FD_BITS | fd
        try:
            os.ftruncate(fd, size)
            return cls(open_segment(os.getpid(), place=place), place)
        except OSError:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the file descriptor: no further process can map the segment. Existing mappings stay valid."""
        os.close(self.place & (1 << _FD_BITS) - 1)


def _memfd(label: str) -> int:
    """Return a file descriptor of the C function memfd_create; builds of conda and uv lack os.memfd_create."""
    create = getattr(_C, "memfd_create", None)
    if sys.platform != "linux" or create is None:
        raise OSError(f"{sys.platform} has no memfd")
    fd: int = create(label.encode(), _CLOSED_ON_EXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"memfd: {os.strerror(ctypes.get_errno())}")
    return fd


def open_segment(process: int, *, place: int) -> Tensor:
    """Map the segment with this `SharedSegment.place` in `process` (a PID); return its bytes, uint8. Raises OSError."""
    path = _path(process, place)
    if not _is_there(process, place):
        raise OSError(f"{path} is not the segment {_LABEL}{place >> _FD_BITS}; its process has closed it or ended")
    try:
        with torch.inference_mode(mode=False):  # an inference tensor could not be written to outside the mode
            return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"cannot map {path}: {error}") from error


def _path(process: int, place: int) -> Path:
    return Path(f"/proc/{process}/fd/{place & (1 << _FD_BITS) - 1}")


def _is_there(process: int, place: int) -> bool:
    with contextlib.suppress(OSError):
        return str(_path(process, place).readlink()).startswith(f"/memfd:{_LABEL}{place >> _FD_BITS} ")
    return False


def fits(size: int, *, slab: int) -> bool:
    """Return whether `size` bytes fit into a slab of `slab` bytes, and leave at most size / 4 + one page unused."""
    return size <= slab <= size + size // 4 + _PAGE


class TensorSlabs:
    """Pool of shared segments (slabs) for the tensors of one rank."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        self._lent: dict[int, tuple[SharedSegment, weakref.ref[memoryview]]] = {}
        """By address: each slab in use, and a weak reference to the memory view behind its tensors."""
        self._free: list[SharedSegment] = []
        self._kept = KEPT

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized 1-D tensor in shared memory; its slab is reused when its last view is freed.
        Ordinary memory is used in a fork of the rank's process, and if shared memory is refused. It is also used while
        256 slabs are in use, because each needs a file descriptor."""
        if len(self._lent) < 256 and os.getpid() == self._process:
            with contextlib.suppress(OSError):
                return self.lend(numel, dtype=dtype)
        return torch.empty(numel, dtype=dtype)

    def lend(self, numel: int, *, dtype: torch.dtype, briefly: bool = False) -> Tensor:
        """Return a 1-D tensor in shared memory, whatever the number of slabs in use. Raises OSError when refused.
        briefly: for one call. Any unused slab that is large enough serves; a new one has room for a quarter more."""
        size = max(1, numel * dtype.itemsize)
        slab = self._fitting(size, briefly=briefly)
        if slab is None:
            slab = self.make(size + size // 4 if briefly else size)
            _advise(slab.memory[:size], _POPULATE_WRITE)
        lease = memoryview(slab.memory.numpy())  # type: ignore[arg-type] # an array is a buffer
        address = slab.memory.data_ptr()
        self._lent[address] = slab, weakref.ref(lease, lambda _: self._give_back(address))
        return torch.frombuffer(lease, dtype=torch.uint8, count=size)[: numel * dtype.itemsize].view(dtype)

    def make(self, size: int) -> SharedSegment:
        """Return a new segment of at least `size` bytes that the pool does not reuse. Raises OSError when refused."""
        return SharedSegment.make(next(self._numbers), size=-(-size // _PAGE) * _PAGE)

    def locate(self, x: Tensor) -> tuple[int, int] | None:
        """Return the place of the slab that holds `x` and the offset of `x` there in bytes; None for other tensors."""
        start = x.untyped_storage().data_ptr()
        lent = self._lent.get(start)
        return None if lent is None else (lent[0].place, x.data_ptr() - start)

    def _fitting(self, size: int, *, briefly: bool) -> SharedSegment | None:
        """Remove from the pool the smallest unused slab that can hold `size` bytes, and return it; None if none can."""
        for slab in sorted(self._free, key=lambda slab: slab.memory.numel()):
            if fits(size, slab=slab.memory.numel()) or (briefly and size <= slab.memory.numel()):
                with contextlib.suppress(ValueError):
                    self._free.remove(slab)
                    return slab
        return None

    def _give_back(self, address: int) -> None:
        if os.getpid() != self._process:
            return  # a fork of the rank's process: the rank still uses the memory
        self._free.append(self._lent.pop(address)[0])
        self._discard(self._kept)

    def keep_none(self) -> None:
        """Free the unused slabs now, and from now on each slab as soon as its last tensor is freed."""
        self._kept = 0
        self._discard(0)

    def _discard(self, most: int) -> None:
        with contextlib.suppress(IndexError):  # garbage collection may call this function again meanwhile
            while len(self._free) > most:
                slab = self._free.pop(0)
                _advise(slab.memory, _REMOVE)  # even while other processes map it
                slab.close()


class JointTensors:
    """Register of the joint tensors of this rank: tensors whose memory several ranks share (`World.shared_empty`)."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, ...], int, weakref.ref[memoryview]]] = {}
        """By address: the ranks that share the tensor, its number among their joint tensors, from 1, and its lease."""
        self._counts: Counter[tuple[int, ...]] = Counter()

    def add(self, memory: Tensor, *, ranks: tuple[int, ...]) -> Tensor:
        """Register `memory` as a tensor of `ranks`, and return a view. The entry ends when the last view is freed."""
        lease = memoryview(memory.numpy())  # type: ignore[arg-type] # an array is a buffer
        address = memory.data_ptr()
        self._counts[ranks] += 1
        self._known[address] = ranks, self._counts[ranks], weakref.ref(lease, lambda _: self._known.pop(address))
        return torch.frombuffer(lease, dtype=torch.uint8)

    def name(self, tensors: Sequence[Tensor], *, ranks: tuple[int, ...]) -> int:
        """Return a hash of the places of `tensors` in joint tensors, equal on all `ranks`; 0 if one is in none."""
        if not self._known:
            return 0
        where: list[int] = []
        for x in tensors:
            start = x.untyped_storage().data_ptr()
            if start not in self._known or self._known[start][0] != ranks:
                return 0
            where += self._known[start][1], x.data_ptr() - start, x.nbytes
        return hash(tuple(where)) & _NAMES | 1  # integers have the same hash in every process


class PeerMappings:
    """Segments of another process that this process has mapped."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._mapped: dict[int, Tensor] = {}

    def at(self, place: int) -> Tensor:
        """Return the bytes of the slab `place` of that process; the first call maps the slab. Also unmaps slabs that
        the process has closed. Raises OSError when the slab cannot be mapped."""
        if place not in self._mapped:
            self._mapped = {known: x for known, x in self._mapped.items() if _is_there(self._process, known)}
            self._mapped[place] = open_segment(self._process, place=place)
            _advise(self._mapped[place], _POPULATE_READ)
        return self._mapped[place]


def _advise(memory: Tensor, how: int) -> None:
    """Call madvise for `memory`. A kernel without the advice `how` ignores the call (populate: before Linux 5.14)."""
    _C.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), how)

"""Set how the C library (glibc) keeps freed memory that holds tensors, on a CPU.

Until a training has its shape, all of it goes back to the system. The model's own memory, whose values the buckets have
taken, is freed amid memory that stays. And the first step would place the optimizer's state among its activations. The
holes between would be too small for later activations and would count in every peak. So in the first step every large
tensor has its own mapping: the heap holds only what that step frees.

From then on every step takes what the step before has freed. Returned memory would come back page by page, each cleared
by the system and missed by the cache. That is 35 000 to 85 000 pages in a step of the same ranks, 2 to 9 % of its time.
The price is memory: up to a tenth more at the peak where blocks of several sizes do not fit into each other's places.
The last rank of a pipeline, which has the scores, takes a quarter more.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from meshwise.comm.api.world import World

MallocOptions: TypeAlias = Sequence[tuple[int, int]]
"""Parameters of `mallopt` by their number in malloc.h, and their values."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_MOST = 2**31 - 1
_ORDINARY = ((_TRIM_THRESHOLD, 64 << 20), (_MMAP_THRESHOLD, 32 << 20), (_MMAP_MAX, 65536))
"""Values that glibc itself reaches where large tensors are freed."""
KEEP_FREED = ((_TRIM_THRESHOLD, _MOST), (_MMAP_MAX, 0))
"""Freed memory is kept."""
MAP_SEPARATELY = ((_TRIM_THRESHOLD, 128 << 10), (_MMAP_THRESHOLD, 256 << 10), (_MMAP_MAX, 65536))
"""Every large block has its own mapping, which goes back to the system when it is freed."""
_ENVIRONMENT = ("MALLOC_", "GLIBC_TUNABLES")


def set_malloc(options: MallocOptions = ()) -> None:
    """Return free memory to the system once, and set `options` unless the environment configures glibc's allocator.

    Other C libraries are left alone.
    """
    library = ctypes.CDLL(None)
    trim = getattr(library, "malloc_trim", None)
    if trim is None:
        return
    trim(0)
    if not any(name.startswith(_ENVIRONMENT) for name in os.environ):
        for option, value in options:
            library.mallopt(option, value)


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep freed memory within the block, as a running training does, so that timings are comparable."""
    set_malloc(KEEP_FREED)
    try:
        yield
    finally:
        set_malloc(_ORDINARY)


@contextlib.contextmanager
def first_step_of(world: World) -> Iterator[None]:
    """Give each large tensor its own mapping inside the block, the first step; then keep freed memory."""
    set_malloc(MAP_SEPARATELY if _keeps(world) else ())
    try:
        yield
    finally:
        keep_freed_memory_of_rank(world)


def keep_freed_memory_of_rank(world: World) -> None:
    """Keep freed memory from now on if this rank is one of several on CPUs: its process only trains."""
    set_malloc(KEEP_FREED if _keeps(world) else ())


def _keeps(world: World) -> bool:
    return world.device.type == "cpu" and world.size > 1

"""Set how the C library (glibc) keeps freed memory that holds tensors, on a CPU.

Until a training has its shape, all of it goes back to the system. The model's own memory, whose values the buckets have
taken, is freed amid memory that stays. And the first step would place the optimizer's state among its activations. The
holes between would be too small for later activations and would count in every peak. So in the first step every large
tensor has its own mapping: the heap holds only what that step frees.

From then on every step takes what the step before has freed. Returned memory would come back page by page, each cleared
by the system and missed by the cache. That is 35 000 to 85 000 pages in a step of the same ranks, 2 to 9 % of its time.
The price is memory. Up to a tenth more at the peak where blocks of several sizes do not fit into each other's places,
and a quarter more on the last rank of a pipeline, which has the scores.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence

from meshwise.comm.api.world import World

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # M_TRIM_THRESHOLD, … of malloc.h
_MOST = 2**31 - 1
# What glibc comes to by itself, at most, where large tensors are freed; and what it begins with.
_ORDINARY = ((_TRIM_THRESHOLD, 64 << 20), (_MMAP_THRESHOLD, 32 << 20), (_MMAP_MAX, 65536))
# What is freed is kept.
_KEPT = ((_TRIM_THRESHOLD, _MOST), (_MMAP_MAX, 0))
# Whatever is large lies by itself.
_APART = ((_TRIM_THRESHOLD, 128 << 10), (_MMAP_THRESHOLD, 256 << 10), (_MMAP_MAX, 65536))
_SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")


def settle(*, keep: bool) -> None:
    """Give what is free back to the system, once; with `keep`, keep what is freed later.

    What the environment says about the C library's allocator is left as it is. Other libraries do it by themselves.
    """
    _settle(_KEPT if keep else ())


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep freed memory within the block, as a running training does, so that timings match; then return it to the
    system.
    """
    settle(keep=True)
    try:
        yield
    finally:
        _settle(_ORDINARY)


def _settle(options: Sequence[tuple[int, int]]) -> None:
    library = ctypes.CDLL(None)
    trim = getattr(library, "malloc_trim", None)
    if trim is None:
        return
    trim(0)
    if not any(name.startswith(_SETTINGS) for name in os.environ):
        for option, value in options:
            library.mallopt(option, value)


def lay_apart() -> None:
    """From now on, until `settle`, give every large block memory of its own, which goes back when it is freed."""
    _settle(_APART)


@contextlib.contextmanager
def shaping(world: World) -> Iterator[None]:
    """Give large tensors their own mappings within the block, the first step of a rank; then call `settle_rank`."""
    if _keeps(world):
        lay_apart()
    try:
        yield
    finally:
        settle_rank(world)


def settle_rank(world: World) -> None:
    """`settle` for a rank: one of several on CPUs is there for its training alone, and keeps what it frees."""
    settle(keep=_keeps(world))


def _keeps(world: World) -> bool:
    return world.device.type == "cpu" and world.size > 1

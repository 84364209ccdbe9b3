"""What the C library does with memory that is freed, where tensors are in it (glibc, on a CPU).

Until a training has its shape, all of it goes back to the system. The model's own memory, whose values the buckets have
taken, goes in the midst of what stays; and the first step would lay out the optimizer's state among the activations of
that step, with holes between them that later activations do not fit into and that count in every peak from then on. So
in the first step whatever is large lies by itself: the heap has nothing in it but what that step frees.

From then on every step takes what the step before has freed. Given back, it would come again page by page, each cleared
by the system and missed by the processor: 35 000 to 85 000 pages in a step of the same ranks, 2 to 9 % of its time. The
price is memory: up to a tenth more at its peak where blocks of several sizes do not fit into one another's places, and
a quarter more on the last rank of a pipeline, which has the scores.
"""

from __future__ import annotations

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
    """Inside, what is freed is kept, as in a training that has its shape, for what is timed there to take as long; then
    it goes back to the system.
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
    """Inside is the first step of a rank, in which what is large lies by itself; then, `settle_rank`."""
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

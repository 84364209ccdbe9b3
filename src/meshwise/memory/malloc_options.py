"""Configure glibc's allocator for CPU tensors, and explain out-of-memory errors.

A training sets options only if several ranks run on CPUs. In the first step (`first_step_of`) every large tensor has
its own mapping, which returns to the system when the tensor is freed. Freed tensors in the heap would leave holes: the
user's model beside the buckets with its values, and activations beside the optimizer's new state. Such holes are too
small for later activations, and count in every memory peak.

docs/memory.md says why freed memory is kept from the second step on ("Freed memory").

An out-of-memory error itself names only the bytes of the allocation that failed, not the tensors that filled the
memory. `memory_errors_explained` adds a note with this rank's memory by category to an error of a user's script."""

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from meshwise.comm.api.world import World
from meshwise.plan import Plan


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that no memory is left, on the device or in the process."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


@contextlib.contextmanager
def memory_errors_explained(
    plan: Plan, *, memory: Callable[[], Mapping[str, int]] = dict, hint: Callable[[], str] = str
) -> Iterator[None]:
    """Add a note to out-of-memory errors: bytes by category (`memory()`), `hint()`, and a call that predicts memory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(_note(plan, memory(), hint()))
        raise


def _note(plan: Plan, sizes: Mapping[str, int], hint: str) -> str:
    width = max(map(len, sizes), default=0)
    rows = [f"  {kind:<{width}}  {size / 2**20:9.1f} MiB" for kind, size in sizes.items() if size]
    used = ["Besides activations, this rank held:", *rows] if rows else []
    return "\n".join(
        [
            f"There was no memory left under the plan '{plan}'.",
            *used,
            *filter(None, [hint]),
            "To see what the plan needs by category, and the cheapest change that fits, run",
            f'  print(mw.needs(model, "{plan}", loss=loss, batch=batch))',
            "in a new process, with the model, loss, optimizer and options of parallelize. It needs little memory.",
        ]
    )


# Parameters of `mallopt`, by their numbers in malloc.h. Values are bytes, or for `_MMAP_MAX` a count.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_ORDINARY = ((_TRIM_THRESHOLD, 64 << 20), (_MMAP_THRESHOLD, 32 << 20), (_MMAP_MAX, 65536))
"""Values that glibc itself chooses after large tensors were freed."""
KEEP_FREED = ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_MAX, 0))
"""Options under which glibc keeps all freed memory and maps no block separately."""
MAP_SEPARATELY = ((_TRIM_THRESHOLD, 128 << 10), (_MMAP_THRESHOLD, 256 << 10), (_MMAP_MAX, 65536))
"""Options under which each block of 256 KiB or more has its own mapping, which is unmapped when it is freed."""


def set_malloc(options: Sequence[tuple[int, int]] = ()) -> None:
    """Return free memory to the system once, and set `options` of glibc's allocator for this process.

    The options are not set if the environment configures the allocator. With another C library nothing happens."""
    library = ctypes.CDLL(None)
    trim = getattr(library, "malloc_trim", None)
    if trim is None:
        return
    trim(0)
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        for option, value in options:
            library.mallopt(option, value)


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep freed memory inside the block, as a training does, so that measured times are comparable."""
    set_malloc(KEEP_FREED)
    try:
        yield
    finally:
        set_malloc(_ORDINARY)


@contextlib.contextmanager
def first_step_of(world: World) -> Iterator[None]:
    """Map large tensors separately in this context, then keep freed memory; sets no options for one rank or on GPUs."""
    set_malloc(MAP_SEPARATELY if _keeps(world) else ())
    try:
        yield
    finally:
        keep_freed_memory_of_rank(world)


def keep_freed_memory_of_rank(world: World) -> None:
    """Return free memory to the system once; keep later freed memory if this is one of several ranks on CPUs."""
    set_malloc(KEEP_FREED if _keeps(world) else ())


def _keeps(world: World) -> bool:
    return world.device.type == "cpu" and world.size > 1

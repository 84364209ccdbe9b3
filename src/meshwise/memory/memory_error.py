"""Explain an out-of-memory error of a user's own script by a note with this rank's memory by category.

The error itself names only the bytes of the allocation that failed, not the tensors that filled the memory."""

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping

import torch

from meshwise.plan import Plan


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that no memory is left, on the device or in the process."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


@contextlib.contextmanager
def memory_errors_explained(plan: Plan, *, memory: Callable[[], Mapping[str, int]] = dict) -> Iterator[None]:
    """Add a note to an out-of-memory error inside the block: the bytes of `memory()`, and how to predict a plan."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(_note(plan, memory()))
        raise


def _note(plan: Plan, sizes: Mapping[str, int]) -> str:
    width = max(map(len, sizes), default=0)
    rows = [f"  {kind:<{width}}  {size / 2**20:9.1f} MiB" for kind, size in sizes.items() if size]
    used = ["Besides activations, this rank held:", *rows] if rows else []
    return "\n".join(
        [
            f"There was no memory left under the plan '{plan}'.",
            *used,
            "To see what the plan needs by category, and the cheapest change that fits, run",
            f'  print(mw.needs(model, "{plan}", loss=loss, batch=batch))',
            "in a new process, with the model, loss, optimizer and options of parallelize. It allocates nothing.",
        ]
    )

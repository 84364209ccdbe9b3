"""Explain an out-of-memory error that leaves a training without a job, in a user's own script.

The allocation that failed says how many bytes it wanted, and nothing about what filled the rest.
"""

import contextlib
import errno
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from meshwise.plan import Plan

Given = ParamSpec("Given")
Result = TypeVar("Result")


class MemoryHolder(Protocol):
    """Object that can list the memory it holds."""

    plan: Plan

    def memory(self) -> dict[str, int]:
        """Return bytes by category."""


Whole = TypeVar("Whole", bound=MemoryHolder)


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that there is no memory left, on the device or in the process."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


@contextlib.contextmanager
def shortage_told(plan: Plan, *, held: Callable[[], Mapping[str, int]] = dict) -> Iterator[None]:
    """Inside, an error of memory gets a note: what this rank holds, and how to learn what plans need."""
    try:
        yield
    except Exception as error:
        if is_shortage(error):
            error.add_note(_note(plan, held()))
        raise


def shortage_noted(
    method: Callable[Concatenate[Whole, Given], Result],
) -> Callable[Concatenate[Whole, Given], Result]:
    """Return the method, with errors of memory noted as `shortage_told` does."""

    @functools.wraps(method)
    def run(self: Whole, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with shortage_told(self.plan, held=self.memory):
            return method(self, *args, **kwargs)

    return run


def _note(plan: Plan, held: Mapping[str, int]) -> str:
    width = max(map(len, held), default=0)
    rows = [f"  {kind:<{width}}  {size / 2**20:9.1f} MiB" for kind, size in held.items() if size]
    has = ["Beside activations, this rank held:", *rows] if rows else []
    return "\n".join(
        [
            f"There was no memory left under the plan '{plan}'.",
            *has,
            "What the plan needs by category, and the cheapest change that fits, is told, with nothing allocated, by",
            f'  print(mw.needs(model, "{plan}", loss=loss, batch=batch))',
            "in a new process, with the model, loss, optimizer and options that parallelize gets.",
        ]
    )

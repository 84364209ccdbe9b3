"""What is done later, or by another thread, in the mode in which it was called.

Nobody can write to a tensor that was made in torch.inference_mode outside of it, and whoever does a rank's part in a
call, a carrier's thread or the rank itself when it comes by, may be outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


def as_called(job: Callable[[], None]) -> Callable[[], None]:
    """`job`, to be done in inference mode when that is on now."""
    if not torch.is_inference_mode_enabled():
        return job

    def inside() -> None:
        with torch.inference_mode():
            job()

    return inside


def each_as_called(steps: Iterator[T]) -> Iterator[T]:
    """Yield `steps`, each advanced in inference mode if that is on now."""
    return _each(steps) if torch.is_inference_mode_enabled() else steps


def _each(steps: Iterator[T]) -> Iterator[T]:
    while True:
        with torch.inference_mode():
            try:
                step = next(steps)
            except StopIteration:
                return
        yield step

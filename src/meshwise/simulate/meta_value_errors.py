"""Explain errors of models that read the values of meta tensors, which have no values.

A rehearsal runs the model on meta tensors: `x.item()` or `if mask.any():` fails unless the value follows from sizes or
from integers of the batch."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshwise.model.shape_constants import ShapeConstants

ASKED = "a rehearsal's tensors have no values, but the model seems to read some"
"""Reason to append to an error if `asks_for_values` is True for it."""

_NO_VALUES = (
    f"{ASKED}. Only integers and booleans of the batch have values, if the batch has values and is not too large. "
    "Mixtures of experts in transformers read values of their router; with experts_implementation='batched_mm' they do "
    "not."
)


def asks_for_values(error: Exception) -> bool:
    """Return whether the message of an error is about a meta tensor, so the model probably read a value."""
    return re.search(r"(\b|register_)meta\b", str(error), re.IGNORECASE) is not None


@contextlib.contextmanager
def explaining_values() -> Iterator[None]:
    """Add a note about missing values to an error of the block that comes from reading a meta tensor.

    The error is raised again. A TypeError, which torch raises if numpy reads a meta tensor, becomes a RuntimeError."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if not asks_for_values(error):
            raise
        if isinstance(error, TypeError):
            explained = RuntimeError(str(error))
            explained.add_note(_NO_VALUES)
            raise explained from error
        error.add_note(_NO_VALUES)
        raise


def wrap_for_rehearsal(call: Callable[..., Any], *, constants: ShapeConstants) -> Callable[..., Any]:
    """Return `call`, wrapped to run on meta tensors.

    While it runs, torch's default device is meta, and `constants` knows values that follow from sizes or the batch."""

    def run(*given: Any) -> Any:
        with torch.device("meta"), constants.forward():
            return call(*given)

    return run

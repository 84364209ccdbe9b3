"""Explain requests for values that the tensors of a rehearsal do not have."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshwise.model.shape_constants import ShapeConstants

ASKED = "a rehearsal's tensors have no values, and the model seems to ask for some"

ASKS_ITS_BATCH = "The model asks its batch for values, and is rehearsed with those of the job's first batch."

_NO_VALUES = (
    f"{ASKED}. Those of the batch's integers are known, where it is given with values and they are not too many, and "
    "no others. Mixtures of transformers ask for those of their experts, which experts_implementation='batched_mm' "
    "does not."
)


def asks_for_values(error: Exception) -> bool:
    """Return whether an error is about reading the value of a meta tensor."""
    return re.search(r"(\b|register_)meta\b", str(error), re.IGNORECASE) is not None


@contextlib.contextmanager
def explaining_values() -> Iterator[None]:
    """Add a note to torch's errors about missing values in the block.

    Raises RuntimeError, also where torch raises a TypeError, as it does for numpy.
    """
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
    """Return a function wrapped for a rehearsal.

    Tensors that it makes without a device are meta tensors; values that follow from sizes alone are known.
    """

    def run(*given: Any) -> Any:
        with torch.device("meta"), constants.forward():
            return call(*given)

    return run

"""Define the inputs of a rehearsal: the training, its batch without values, and the errors of code that reads values.

`RehearsalSubject` has all that `parallelize` gets, except the plan. `MetaBatch` replaces the tensors of the user's
batch by meta tensors, but keeps the values of integers and booleans:

    | batch of the user       batch of the rehearsal      values kept
    | input_ids   [6, 10]     [8, 10] on meta             rows 0 1 2 3 4 5 0 1
    | mask        [6, 10]     [8, 10] on meta             rows 0 1 2 3 4 5 0 1
    | images      [6, 3, 9]   [8, 3, 9] on meta           none

A model may read masks, positions and lengths to choose a branch or a size. It rarely reads floating-point values. If it
does, `x.item()` or `if mask.any():` fails, unless the value follows from sizes or from integers of the batch.
`explaining_values` explains such an error."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base import tensor_tree as tree
from meshwise.engine.parallelize import Options
from meshwise.model.forward import Loss
from meshwise.model.shape_constants import ShapeConstants
from meshwise.optim.flat_optimizer import OptimizerClass

Device: TypeAlias = Literal["cpu", "cuda"]
"""Kind of device of the ranks that are predicted; the rehearsal itself needs no device."""


@dataclass(frozen=True)
class RehearsalSubject:
    """Training that is rehearsed under one or several plans: the arguments of `parallelize` except the plan."""

    model: nn.Module | Callable[[], nn.Module]
    """Module, which is not changed, or the function that builds it."""
    loss: Loss
    """Function `loss(output, batch)` that returns (sum, count)."""
    batch: Any
    """Global batch like those of the training. Its shapes count, and the values of integer and boolean tensors."""
    optimizer: OptimizerClass = torch.optim.AdamW
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the optimizer."""
    options: Options = field(default_factory=Options)


LARGEST = 2**24
"""Largest number of elements of a tensor whose values are kept."""


@dataclass(frozen=True)
class MetaBatch:
    """Batch of meta tensors, with the values of its small integer and boolean tensors."""

    batch: Any
    values: tuple[tuple[Tensor, Tensor], ...]
    """Pairs of a meta tensor and its values, as for `ShapeConstants`."""

    @classmethod
    def of(cls, batch: Any, *, rows: int) -> "MetaBatch":
        """Return a batch of meta tensors with `rows` rows; kept values repeat the batch's rows in order."""
        values: list[tuple[Tensor, Tensor]] = []

        def stand_in(tensor: Tensor) -> Tensor:
            shape = (rows, *tensor.shape[1:])
            bare = torch.empty(shape, dtype=tensor.dtype, device="meta")
            counts = not (tensor.is_floating_point() or tensor.is_complex())
            dense = type(tensor) is Tensor and not (tensor.is_meta or tensor.is_sparse)
            if counts and dense and len(tensor) > 0 and bare.numel() <= LARGEST:
                values.append((bare, tensor.cpu()[torch.arange(rows) % len(tensor)].contiguous()))
            return bare

        return cls(tree.map_tensors(stand_in, batch), tuple(values))


def with_rows(batch: Any, *, rows: int) -> Any:
    """Return a batch of `rows` rows: CPU tensors where `MetaBatch` keeps the values, meta tensors otherwise."""
    made = MetaBatch.of(batch, rows=rows)
    values = {id(bare): known for bare, known in made.values}
    return tree.map_tensors(lambda bare: values.get(id(bare), bare), made.batch)


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

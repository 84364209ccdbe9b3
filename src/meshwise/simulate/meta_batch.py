"""Replace the user's batch by meta tensors, and keep the values of its integers.

    | the user's             stands for it in a rehearsal       has values
    | input_ids   [6, 10]    [8, 10] on meta                    the rows 0 1 2 3 4 5 0 1
    | mask        [6, 10]    [8, 10] on meta                    the same rows
    | images      [6, 3, 9]  [8, 3, 9] on meta                  none

A model reads masks, positions and lengths to choose a branch or a size. Other numbers hardly ever change which
operations run.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.base import tensor_tree as tree

LARGEST = 2**24
"""Elements of a tensor that keeps its values."""


@dataclass(frozen=True)
class MetaBatch:
    """A batch without values, and the values of some of its tensors."""

    batch: Any
    values: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, batch: Any, *, rows: int) -> "MetaBatch":
        """Return the meta batch of a batch, whose rows are repeated until there are `rows`."""
        values: list[tuple[Tensor, Tensor]] = []

        def stand_in(tensor: Tensor) -> Tensor:
            shape = (rows, *tensor.shape[1:])
            bare = torch.empty(shape, dtype=tensor.dtype, device="meta")
            if _keeps_values(tensor) and bare.numel() <= LARGEST:
                values.append((bare, tensor.cpu()[torch.arange(rows) % len(tensor)].contiguous()))
            return bare

        return cls(tree.map_tensors(stand_in, batch), tuple(values))


def with_rows(batch: Any, *, rows: int) -> Any:
    """Return a batch of `rows` rows to rehearse with: its tensors have values where `MetaBatch` keeps them."""
    made = MetaBatch.of(batch, rows=rows)
    values = {id(bare): known for bare, known in made.values}
    return tree.map_tensors(lambda bare: values.get(id(bare), bare), made.batch)


def _keeps_values(tensor: Tensor) -> bool:
    """Return whether the values of a tensor are kept: integers and booleans, because a model may read them."""
    counts = not (tensor.is_floating_point() or tensor.is_complex())
    return counts and type(tensor) is Tensor and not (tensor.is_meta or tensor.is_sparse) and len(tensor) > 0

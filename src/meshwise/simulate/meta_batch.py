"""Replace the tensors of the user's batch by meta tensors, but keep the values of integers and booleans.

    | batch of the user       batch of the rehearsal      values kept
    | input_ids   [6, 10]     [8, 10] on meta             rows 0 1 2 3 4 5 0 1
    | mask        [6, 10]     [8, 10] on meta             rows 0 1 2 3 4 5 0 1
    | images      [6, 3, 9]   [8, 3, 9] on meta           none

A model may read masks, positions and lengths to choose a branch or a size. It rarely reads floating-point values."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwise.base import tensor_tree as tree

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

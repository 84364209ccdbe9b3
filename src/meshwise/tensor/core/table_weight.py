"""Weight of a split embedding, for a model whose forward computes the logits with the embedding's weight.

    return functional.linear(x, self.embedding.weight)          return x @ self.embedding.weight.T

Such a forward calls no linear module that could be split. So while the model runs, a split embedding returns its weight
as a `TableWeight`, a tensor of the table's full shape. Its product with the hidden states is split logits, as a head
returns. Other functions of its values raise ValueError, because a rank has only a part of the table."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from meshwise.tensor.core.global_shape_tensor import ANSWERED_BY_PART, GlobalShapeTensor

_TRANSPOSES = frozenset(
    {
        *(Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
        *(Tensor.transpose, torch.transpose, Tensor.swapaxes),
    }
)
_CONVERSIONS = frozenset(getattr(Tensor, name) for name in ("to", "float", "double", "half", "bfloat16", "type_as"))
_PRODUCTS = frozenset({Tensor.matmul, torch.matmul, Tensor.__matmul__, Tensor.mm, torch.mm})


class TableWeight(GlobalShapeTensor):
    """Embedding table of the full shape that holds this rank's part as `local`.

    | size_of_table   (rows, features) of the full table
    | head            function that returns split logits from the hidden states and the rank's part
    | flipped         True if the tensor is the transposed table, (features, rows)"""

    size_of_table: tuple[int, ...]
    head: Callable[[Tensor, Tensor], Tensor]
    flipped: bool
    too_late = "{} got a table that is split over the ranks; call the embedding, or multiply with its weight"

    @staticmethod
    def __new__(
        cls, local: Tensor, *, size: tuple[int, ...], head: Callable[[Tensor, Tensor], Tensor], flipped: bool = False
    ) -> "TableWeight":
        """Return a table of `size` (rows, features) with the part `local`, which is never transposed."""
        self = cls.over(local, shape=size[::-1] if flipped else size)
        self.size_of_table, self.head, self.flipped = size, head, flipped
        return self

    def _like(self, local: Tensor, *, flipped: bool) -> "TableWeight":
        return TableWeight(local, size=self.size_of_table, head=self.head, flipped=flipped)

    @classmethod
    def answer(cls, func: Any, *, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Return logits, the transposed or converted table, or a property of it; ValueError for other functions."""
        if func is functional.linear:
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **given}
            args = (given["input"], given["weight"])
        first, second = (*args, None, None)[:2]
        if isinstance(first, TableWeight):
            if func in _TRANSPOSES:
                return first._like(first.local, flipped=not first.flipped)
            if func in _CONVERSIONS:
                return first._like(func(first.local, *args[1:], **given), flipped=first.flipped)
            if func in ANSWERED_BY_PART:
                return func(first.local, *args[1:], **given)
        elif isinstance(second, TableWeight):
            if func is functional.linear and not second.flipped:
                logits, bias = second.head(first, second.local), given.get("bias")
                return logits if bias is None else logits + bias
            if func in _PRODUCTS and second.flipped:
                return second.head(first, second.local)
        table = next(value for value in pytree.tree_leaves((args, given)) if isinstance(value, TableWeight))
        raise ValueError(
            f"a table of {table.size_of_table[0]} rows is split over the ranks of tp, and the forward uses its weight "
            f"in {getattr(func, '__name__', func)}: this rank has a part of the rows. Call the embedding, or multiply "
            "with its weight"
        )

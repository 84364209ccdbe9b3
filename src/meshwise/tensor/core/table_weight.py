"""A table that a forward multiplies with: a head tied by use, not by registration.

    return functional.linear(x, self.embedding.weight)          return x @ self.embedding.weight.T

No module is called there that could play a part. So while the model runs, a split embedding returns its weight as a
`TableWeight`. It has the table's full shape, and a product with it is the head's product, which leaves the logits
split. To look numbers up in it is refused. Whatever else is computed with it is computed with what this rank has, and
refused by `first_forward`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from meshwise.tensor.core.global_shape_tensor import OF_THE_PART, GlobalShapeTensor

_FLIPS = frozenset({Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__})  # type: ignore[attr-defined]
_EXCHANGES = frozenset({Tensor.transpose, torch.transpose, Tensor.swapaxes})
_CONVERSIONS = frozenset(getattr(Tensor, name) for name in ("to", "float", "double", "half", "bfloat16", "type_as"))
_CUTS_OFF = frozenset({Tensor.detach, torch.detach, Tensor.data.__get__})  # type: ignore[attr-defined]
_PRODUCTS = frozenset({Tensor.matmul, torch.matmul, Tensor.__matmul__, Tensor.mm, torch.mm})


class TableWeight(GlobalShapeTensor):
    """This rank's part of a table of `size` rows and features, as a tensor of the full shape.

    `head` computes this rank's logits from the hidden states and the part; `flipped`: it stands as (features, rows).
    """

    size_of_table: tuple[int, ...]
    head: Callable[[Tensor, Tensor], Tensor]
    flipped: bool
    too_late = "{} got a table that is split over the ranks; call the embedding, or multiply with it"

    @staticmethod
    def __new__(
        cls, local: Tensor, *, size: tuple[int, ...], head: Callable[[Tensor, Tensor], Tensor], flipped: bool = False
    ) -> "TableWeight":
        """`local`: this rank's part of a table of this `size`, in the table's order."""
        self = cls.over(local, shape=size[::-1] if flipped else size)
        self.size_of_table, self.head, self.flipped = size, head, flipped
        return self

    def _like(self, local: Tensor, *, flipped: bool) -> "TableWeight":
        return TableWeight(local, size=self.size_of_table, head=self.head, flipped=flipped)

    @classmethod
    def answer(cls, func: Any, *, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Return a product is the head's; anything else is computed with what this rank has."""
        if func is functional.linear and len(args) < 2:
            given = {**dict(zip(("input", "weight"), args, strict=False)), **given}
            args = (given.pop("input"), given.pop("weight"))
        first, second = (*args, None, None)[:2]
        if isinstance(first, TableWeight):
            if func in _FLIPS or (func in _EXCHANGES and _swaps(args[1:])):
                return first._like(first.local, flipped=not first.flipped)
            if func is torch.embedding:
                raise ValueError(_refusal(first, "looks numbers up in its weight"))
            if func in _CONVERSIONS:
                return first._like(func(first.local, *args[1:], **given), flipped=first.flipped)
        if isinstance(second, TableWeight) and not isinstance(first, TableWeight):
            if func is functional.linear and not second.flipped:
                bias = given.get("bias", args[2] if len(args) > 2 else None)
                logits = second.head(first, second.local)
                return logits if bias is None else logits + bias
            if func is functional.embedding:
                raise ValueError(_refusal(second, "looks numbers up in its weight"))
            if func in _PRODUCTS and second.flipped:
                return second.head(first, second.local)
        if func in _CUTS_OFF or (not torch.is_grad_enabled() and func not in OF_THE_PART):
            table = next(one for one in pytree.tree_leaves((args, given)) if isinstance(one, TableWeight))
            raise ValueError(_refusal(table, "reads its weight where no gradient shows it"))
        args, given = pytree.tree_map_only(TableWeight, _part, (args, given))
        return func(*args, **given)


def _refusal(weight: TableWeight, what: str) -> str:
    return (
        f"a table of {weight.size_of_table[0]} rows is split over the ranks of tp, and the forward {what}: in this "
        "rank's part, as if that were all. Call the embedding instead"
    )


def _part(weight: TableWeight) -> Tensor:
    return weight.local.t() if weight.flipped else weight.local


def _swaps(dims: tuple[Any, ...]) -> bool:
    return {dim % 2 for dim in dims if isinstance(dim, int)} == {0, 1}

"""The tensors of a collective as flat parts, one for each rank of a group, and what has to fit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

from torch import Tensor

Parts: TypeAlias = Tensor | Sequence[Tensor]


def flat(x: Tensor, *, given: bool = False) -> Tensor:
    """A view of `x` in one dim, outside autograd (as in c10d, writing to it does not count as a change of `x`).

    Of one that is `given`, to be read alone, and that torch conjugates or negates when it is read, a copy as it reads.
    Raises ValueError when another one is like that, or `x` is not contiguous.
    """
    if x.is_conj() or x.is_neg():
        if not given:
            raise ValueError(
                f"a collective cannot write to {tuple(x.shape)}, which is conjugated or negated when it is read; pass "
                "x.resolve_conj().resolve_neg()"
            )
        x = x.resolve_conj().resolve_neg()
    if not x.is_contiguous():
        raise ValueError(f"a collective needs contiguous tensors; {tuple(x.shape)} has strides {x.stride()}")
    data = x.data
    return data if data.dim() == 1 else data.view(-1)


def split(x: Parts, size: int, *, given: bool = False) -> list[Tensor]:
    """`x` as `size` flat parts: equal slices (views) of one tensor, or those passed. Raises ValueError otherwise.

    On meta, where there are no values, one view stands for all parts that are alike.
    """
    if isinstance(x, Tensor):
        if x.numel() % size:
            raise ValueError(f"{x.numel()} elements do not divide into {size} equal parts; pass a list of parts")
        whole = flat(x, given=given)
        return [whole[: x.numel() // size]] * size if x.is_meta else list(whole.chunk(size))
    if len(x) != size:
        raise ValueError(f"{len(x)} parts for a group of {size} ranks")
    known: dict[Hashable, Tensor] = {}
    found: list[Tensor] = []
    for part in x:
        like = (part.shape, part.stride(), part.dtype) if part.is_meta else id(part)
        if like not in known:
            known[like] = flat(part, given=given)
        found.append(known[like])
    return found


def passed(x: Parts | None, *, who: str, name: str) -> Parts:
    """`x`, which only one rank of a group has. Raises ValueError when that one, `who`, has passed None."""
    if x is None:
        raise ValueError(f"{who} passes `{name}`; here it is None")
    return x


def fit(x: Tensor, *, part: Tensor) -> None:
    """Raise ValueError unless this rank's tensor has the elements and the dtype of its part."""
    if x.numel() != part.numel() or x.dtype != part.dtype:
        raise ValueError(
            f"this rank's tensor has {x.numel()} elements of {x.dtype}, its part {part.numel()} of {part.dtype}"
        )


def put(x: Tensor, *, into: Tensor) -> None:
    """Copy `x` into `into`, unless it lies there already."""
    if x.data_ptr() != into.data_ptr():
        into.copy_(x)

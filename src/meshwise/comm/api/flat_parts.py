"""Turn the tensors of a collective into flat parts, one for each rank of a group; check, copy and reduce them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from ctypes import memmove
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Parts: TypeAlias = Tensor | Sequence[Tensor]


def flat(x: Tensor, *, given: bool = False) -> Tensor:
    """Return a view of `x` in one dim, outside autograd (as in c10d, writing to it does not count as a change of `x`).

    given: the tensor is only read; where torch conjugates or negates it when it is read, the result is a copy.
    Raises ValueError if it is not contiguous, or is to be written to and conjugated or negated when it is read.
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
    """Return `x` as `size` flat parts: equal slices (views) of one tensor, or the tensors passed.

    Raises ValueError when the tensor does not divide, or the number of tensors is wrong. On the meta
    device one view serves for all equal parts.
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
    """Return `x`, which only the rank `who` of a group passes. Raises ValueError when that rank has passed None."""
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
        copy(x, into=into)


Elements: TypeAlias = Any
"""A tensor, or an array of numpy's of the same memory: both are cut and added in the same way. All operands of
a sum are of one kind.
"""

_ADDED = (torch.float32, torch.float64)


def copy(x: Tensor, *, into: Tensor) -> None:
    """Copy a flat tensor into another one of its size and dtype."""
    if x.is_cpu and into.is_cpu and torch.get_num_threads() == 1:
        memmove(into.data_ptr(), x.data_ptr(), x.nbytes)
    else:
        into.copy_(x)


def elements(x: Tensor, *, op: str) -> Elements:
    """Return a flat tensor of the CPU as what adds it up, or finds the extremes, soonest."""
    return x.numpy() if op == "sum" and x.dtype in _ADDED and torch.get_num_threads() == 1 else x


_OPS: Mapping[str, Callable[..., Any]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ORDERED = frozenset((*_WHOLE, torch.float16, torch.bfloat16, torch.float32, torch.float64))
_SUMMED = _ORDERED | {torch.complex32, torch.complex64, torch.complex128}
_NARROW = (torch.float16, torch.bfloat16)
# Elements that stay in a cache between one part and the next, and pay for their calls.
_BLOCK = 128 << 10


def reduce_in_order(parts: Sequence[Tensor], *, into: Tensor, scratch: Tensor, op: str) -> None:
    """Reduce `parts`, two or more in one dim of equal size and dtype, into `into`. op: sum, max or min.

    `into` may be one of the parts. `scratch`, of their size and dtype, holds intermediate results: a separate tensor,
    or one of the first two parts if it may be overwritten. Half-precision values are summed in float32 and rounded
    once. Raises ValueError for an unknown op.
    """
    require_op(op)
    for *shown, target, total in zip(*(x.split(_BLOCK) for x in (*parts, into, scratch)), strict=True):
        reduce_block(shown, into=target, scratch=total, op=op)


def reduce_block(parts: Sequence[Elements], *, into: Elements, scratch: Elements, op: str) -> None:
    """Reduce parts that are small enough for one pass: all tensors, or all numpy arrays.

    Of arrays there are sums alone.
    """
    if op == "sum" and is_narrow(into.dtype):
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        into.copy_(total)
        return
    reduce: Callable[..., Any] = _OPS[op] if isinstance(into, Tensor) else np.add
    total = parts[0]
    for part in parts[1:-1]:
        total = reduce(total, part, out=scratch)
    reduce(total, parts[-1], out=into)


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether sums of it are made in float32."""
    return dtype in _NARROW


def require_op(op: str, *, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless `op` is one of the reductions, and torch has it for the dtype."""
    if op not in _OPS:
        raise ValueError(f"no reduction {op!r}; there are {', '.join(_OPS)}")
    if dtype is not None and dtype not in (_SUMMED if op == "sum" else _ORDERED):
        raise ValueError(f"torch has no {op} of {dtype}; convert the tensor to a dtype that it has one for")

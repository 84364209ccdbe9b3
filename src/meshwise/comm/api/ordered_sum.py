"""Sums in one fixed order.

Floating-point addition is not associative, so a reduction is only reproducible when its order is. Here the order is
always the order of the group, element by element, however the tensor is cut. So an all-reduce, a reduce-scatter and a
reduce of the same values give the same bits, on every rank and in every run. As in torch's and numpy's loops, two
results depend on where a block ends: which of several NaN a sum has, and which of 0.0 and -0.0 is the larger one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import memmove
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Elements: TypeAlias = Any
"""A tensor, or an array of numpy's of the same memory: both are cut and added alike. A sum's are all of one kind."""

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

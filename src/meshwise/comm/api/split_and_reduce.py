"""Turn the tensors of a collective into 1-D parts, one for each rank of a group; check, copy and reduce the parts."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from ctypes import memmove
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Parts: TypeAlias = Tensor | Sequence[Tensor]
"""One tensor that is cut into equal parts, or a sequence with one part of any size for each index of the group."""


def flat(x: Tensor, *, read_only: bool = False) -> Tensor:
    """Return a 1-D view of `x`, without autograd as in c10d; a copy if `x` has torch's conjugate or negative bit.
    read_only: True if the collective only reads `x`. Raises ValueError if `x` is not contiguous, or if it has such a
    bit and the collective writes to it."""
    if x.is_conj() or x.is_neg():
        if not read_only:
            raise ValueError(
                f"a collective cannot write to a tensor with torch's conjugate or negative bit, {tuple(x.shape)}; pass "
                "x.resolve_conj().resolve_neg()"
            )
        x = x.resolve_conj().resolve_neg()
    if not x.is_contiguous():
        raise ValueError(f"a collective needs contiguous tensors; {tuple(x.shape)} has strides {x.stride()}")
    data = x.data
    return data if data.dim() == 1 else data.view(-1)


def split(x: Parts, size: int, *, read_only: bool = False) -> list[Tensor]:
    """Return `x` as `size` parts in one dim: equal slices of one tensor, or a view of each tensor of the sequence.
    read_only: as in `flat`. On the meta device equal parts are one object. Raises ValueError when the elements do not
    divide equally, when the number of tensors is not `size`, and when `flat` does."""
    if isinstance(x, Tensor):
        if x.numel() % size:
            raise ValueError(f"{x.numel()} elements do not divide into {size} equal parts; pass a list of parts")
        whole = flat(x, read_only=read_only)
        return [whole[: x.numel() // size]] * size if x.is_meta else list(whole.chunk(size))
    if len(x) != size:
        raise ValueError(f"{len(x)} parts for a group of {size} ranks; pass one part for each rank")
    known: dict[Hashable, Tensor] = {}
    found: list[Tensor] = []
    for part in x:
        like = (part.shape, part.stride(), part.dtype) if part.is_meta else id(part)
        if like not in known:
            known[like] = flat(part, read_only=read_only)
        found.append(known[like])
    return found


def require_passed(x: Parts | None, *, who: str, name: str) -> Parts:
    """Return `x`. Raises ValueError if it is None. who: the rank that must pass it. name: name of the argument."""
    if x is None:
        raise ValueError(f"{who} must pass `{name}`, but passed None")
    return x


def require_fit(x: Tensor, *, part: Tensor) -> None:
    """Raise ValueError unless `x`, this rank's tensor, has the number of elements and the dtype of its part."""
    if x.numel() != part.numel() or x.dtype != part.dtype:
        raise ValueError(
            f"this rank's tensor has {x.numel()} elements of {x.dtype}, but its part has {part.numel()} of {part.dtype}"
        )


def put(x: Tensor, *, into: Tensor) -> None:
    """Copy `x` into `into`, unless both begin at the same address."""
    if x.data_ptr() != into.data_ptr():
        copy(x, into=into)


Elements: TypeAlias = Any
"""A tensor, or a numpy array over a tensor's memory. The operands of one sum are all tensors or all arrays."""

_ADDED = (torch.float32, torch.float64)


def copy(x: Tensor, *, into: Tensor) -> None:
    """Copy a 1-D tensor into another 1-D tensor of equal size and dtype. On the CPU with one thread, use memmove."""
    if x.is_cpu and into.is_cpu and torch.get_num_threads() == 1:
        memmove(into.data_ptr(), x.data_ptr(), x.nbytes)
    else:
        into.copy_(x)


def elements(x: Tensor, *, op: str) -> Elements:
    """Return a 1-D CPU tensor in the faster form for `op`: a numpy array for sums in fp32 or fp64 with one thread."""
    return x.numpy() if op == "sum" and x.dtype in _ADDED and torch.get_num_threads() == 1 else x


_OPS: Mapping[str, Callable[..., Any]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ORDERED = frozenset((*_WHOLE, torch.float16, torch.bfloat16, torch.float32, torch.float64))
_SUMMED = _ORDERED | {torch.complex32, torch.complex64, torch.complex128}
_NARROW = (torch.float16, torch.bfloat16)
_CACHED_BYTES = 512 << 10  # of the blocks of all parts together, which fit the cache of a core
_LEAST_BYTES = 64 << 10  # of one block: with smaller ones the calls take longer than the additions
_ALIGNED_BYTES = 4 << 10  # blocks begin at multiples of it: aligned vectors are added faster


def reduce_in_order(parts: Sequence[Tensor], *, into: Tensor, op: str, copies: Sequence[Tensor] = ()) -> None:
    """Reduce two or more 1-D CPU tensors of equal size and dtype into `into`, in their order. op: sum, max or min.
    `into` may be one of the parts. The result is also copied into each of `copies`, block by block: the data are read
    once and written once. fp16 and bf16 are summed in fp32 and rounded once."""
    require_op(op)
    size = max(_LEAST_BYTES, _CACHED_BYTES // len(parts) // _ALIGNED_BYTES * _ALIGNED_BYTES)
    step = size // into.element_size()
    if into.numel() <= step and not copies:
        reduce_block(parts, into=into, scratch=torch.empty_like(into) if len(parts) > 2 else into, op=op)
        return
    whole, target = [elements(x, op=op) for x in parts], elements(into, op=op)
    scratch = elements(torch.empty_like(into[:step]), op=op) if len(parts) > 2 else target
    with np.errstate(all="ignore"):  # torch does not warn of an overflow either
        for start in range(0, into.numel(), step):
            block = slice(start, start + step)
            total = target[block]
            reduce_block([x[block] for x in whole], into=total, scratch=scratch[: len(total)], op=op)
            for other in copies:
                copy(into[block], into=other[block])


def reduce_block(parts: Sequence[Elements], *, into: Elements, scratch: Elements, op: str) -> None:
    """Reduce `parts` into `into`, in their order and as one block. op: sum, max or min. All arguments
    are tensors, or all are numpy arrays; for arrays `op` is sum. `scratch`: memory for partial sums of three or more
    parts; it may be one of the first two, which is then overwritten."""
    if op == "sum" and into.dtype in _NARROW:
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


def require_op(op: str, *, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError unless `op` is sum, max or min, and torch can compute `op` on `dtype` (None: not checked)."""
    if op not in _OPS:
        raise ValueError(f"no reduction {op!r}; there are {', '.join(_OPS)}")
    if dtype is not None and dtype not in (_SUMMED if op == "sum" else _ORDERED):
        raise ValueError(f"torch has no {op} of {dtype}; convert the tensor to another dtype")

"""The tensors of a collective as flat parts, one for each rank of a group, and what has to fit."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from ctypes import memmove
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Parts: TypeAlias = Tensor | Sequence[Tensor]

_BITS = tuple(f"{kind}int{bits}" for kind in ("", "u") for bits in range(1, 8))
_QUANTIZED = ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")
NOT_COPIED = frozenset(vars(torch)[name] for name in _BITS + _QUANTIZED if name in vars(torch))
"""Dtypes that torch has names for and cannot copy. A list: a rehearsal would take a trial for a part of its step. torch
says that it will let the quantized ones go.
"""


def flat(x: Tensor, *, given: bool = False) -> Tensor:
    """Return a view of `x` in one dim, outside autograd (as in c10d, writing to it does not count as a change of `x`).

    Of one that is `given`, to be read alone, and that torch conjugates or negates when it is read, a copy as it reads.
    Raises ValueError if a tensor overlaps another one, is not contiguous, is read-only, or has a dtype that torch
    cannot copy.
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
    if not given and x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError("outside torch.inference_mode a collective cannot write to a tensor that was made in it")
    if x.dtype in NOT_COPIED:
        raise ValueError(f"torch does not copy {x.dtype}; pass x.view(torch.uint8)")
    data = x.data
    return data if data.dim() == 1 else data.view(-1)


def split(x: Parts, size: int, *, given: bool = False) -> list[Tensor]:
    """`x` as `size` flat parts: equal slices (views) of one tensor, or those passed. Raises ValueError otherwise.

    On the meta device one view serves for all equal parts.
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


def apart(given: Sequence[Tensor], *, into: Sequence[Tensor], own: tuple[int, int], of: Parts | None = None) -> None:
    """Raise ValueError when some of `into` lies on what is given: others read that while results are written there.

    `own`: which of them are this rank's own, of both. These two may be one and the same memory. `of`: what the several
    parts are of, when either side is one: slices of one tensor lie apart, and need no look where the one is its slice.
    """
    if into[0].is_meta or (
        isinstance(of, Tensor) and given[own[0]].data_ptr() == into[own[1]].data_ptr() and given[own[0]].numel()
    ):
        return
    if isinstance(of, Tensor):  # as most calls are: one tensor beside a whole, and a look at the whole's ends is enough
        [(begin, end)] = _ranges(given if len(given) == 1 else into)
        if end <= of.data_ptr() or of.data_ptr() + of.nbytes <= begin:
            return
    read, written = _ranges(given), _ranges(into)
    if max(map(itemgetter(1), read)) <= min(written)[0] or max(map(itemgetter(1), written)) <= min(read)[0]:
        return
    if read[own[0]][0] == written[own[1]][0]:
        del read[own[0]]
    stops = [0, 0]
    for start, stop, kind in sorted([(*each, 0) for each in read] + [(*each, 1) for each in written]):
        if start < min(stop, stops[1 - kind]):
            raise ValueError(
                "what is given and `into` overlap, so that results would be put where others still read; only this "
                "rank's own part may lie where it belongs"
            )
        stops[kind] = max(stops[kind], stop)


def _ranges(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """From which address to which each of the flat tensors lies."""
    return [(start := x.data_ptr(), start + x.nbytes) for x in tensors]


def put(x: Tensor, *, into: Tensor) -> None:
    """Copy `x` into `into`, unless it lies there already."""
    if x.data_ptr() != into.data_ptr():
        copy(x, into=into)


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

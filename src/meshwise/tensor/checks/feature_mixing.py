"""Derive what an operation makes of a split tensor: a split tensor again, or something that needs all parts.

`flip` and `sum` mix the dims that they name, a matrix product the one that it contracts, `mul` none. Most of it torch's
own descriptions of its operations tell: which go element by element, which are views, which take a `dim`. The rest is
the table. What neither knows is taken to mix nothing.

A tensor is a part along a dim, or inside of one, where rows and tokens were put into one dim:

    | x             (rows, tokens, features)     Piece(dim=1, step=1, places=tokens)
    | x.flatten(1)  (rows, tokens · features)    Piece(dim=1, step=features, places=tokens)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from meshwise.base.tensor_tree import tensors
from meshwise.model.dispatch_modes import unseen

Arguments: TypeAlias = Mapping[str, Any]
Mixed: TypeAlias = Callable[[Tensor, Arguments], Sequence[int]]


class SplitDim(NamedTuple):
    """Split dim of a tensor: this rank holds `places` of it, `step` apart."""

    dim: int
    step: int
    places: int


class MixedFeaturesError(Exception):
    """More than one place along a dim that is split is needed for a place of the result."""


_CHECKS = frozenset({"all", "any", "equal", "allclose", "is_nonzero", "_local_scalar_dense"})
"""What a forward asks for to go on or to stop, and which is no number of the model."""


def _last(count: int) -> Mixed:
    return lambda _x, _given: range(-count, 0)


def _dim(dim: int) -> Mixed:
    return lambda _x, _given: (dim,)


def _normalised(_x: Tensor, given: Arguments) -> Sequence[int]:
    return range(-len(given["normalized_shape"]), 0)


def _padded(_x: Tensor, given: Arguments) -> Sequence[int]:
    pairs = list(zip(given["pad"][::2], given["pad"][1::2], strict=True))
    return [-1 - place for place, pair in enumerate(pairs) if any(pair)]


def _repeated(x: Tensor, given: Arguments) -> Sequence[int]:
    return [dim - x.dim() for dim, times in enumerate(given["repeats"][-x.dim() :]) if times != 1]


def _convolved(x: Tensor, given: Arguments) -> Sequence[int]:
    """Return the channels, unless each is separate, and the dims that the kernel covers."""
    channels = (1,) if given["groups"] < x.size(1) else ()
    moved = zip(range(2, x.dim()), given["weight"].shape[2:], given["stride"] * x.dim(), strict=False)
    return (*channels, *(dim for dim, kernel, stride in moved if (kernel, stride) != (1, 1)))


def _indexed(_x: Tensor, given: Arguments) -> Sequence[int]:
    """Return the dims that have an index; a mask covers as many dims as it has."""
    found: list[int] = []
    dim = 0
    for index in given["indices"]:
        dims = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        found += [] if index is None else range(dim, dim + dims)
        dim += dims
    return found


_PRODUCTS: Mapping[str, Mapping[str, Mixed]] = {
    "mm": {"self": _dim(-1), "mat2": _dim(-2)},
    "bmm": {"self": _dim(-1), "mat2": _dim(-2)},
    "addmm": {"mat1": _dim(-1), "mat2": _dim(-2)},
    "baddbmm": {"batch1": _dim(-1), "batch2": _dim(-2)},
    "mv": {"self": _dim(-1), "vec": _dim(-1)},
    "addmv": {"mat": _dim(-1), "vec": _dim(-1)},
    "dot": {"self": _dim(-1), "tensor": _dim(-1)},
    "vdot": {"self": _dim(-1), "other": _dim(-1)},
    "linear": {"input": _dim(-1), "weight": _dim(-1)},
}
"""By operation and operand. Every operand is multiplied with all the places of the others."""

_LAST_TWO = ("avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "tril", "triu", "trace", "im2col")
_LAST_THREE = ("avg_pool3d", "max_pool3d_with_indices", "_adaptive_avg_pool3d")
_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")
_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
_ATTENTION: Mapping[str, Mixed] = {"query": _dim(-1), "key": _last(2), "value": _dim(-2)}
_OTHERS: Mapping[str, Mapping[str, Mixed]] = {
    **{name: {"self": _last(2)} for name in _LAST_TWO},
    **{name: {"self": _last(3)} for name in _LAST_THREE},
    **{name: {"self": _dim(-1)} for name in ("reflection_pad1d", "replication_pad1d")},
    **{name: {"self": _indexed} for name in _INDEXED},
    **{name: {"input": lambda x, _given: (0, *range(2, x.dim()))} for name in _BATCH_NORMS},
    **{name: {"x1": _dim(-1), "x2": _last(2)} for name in ("_cdist_forward", "_euclidean_dist")},
    **{name: {"input": _normalised} for name in ("native_layer_norm", "_fused_rms_norm")},
    "native_group_norm": {"input": lambda x, _given: range(1, x.dim())},
    "convolution": {"input": _convolved},
    "embedding": {"weight": _dim(0)},
    "constant_pad_nd": {"self": _padded},
    "repeat": {"self": _repeated},
    "stack": {"tensors": lambda _x, _given: ()},
}
_MIXES: Mapping[str, Mapping[str, Mixed]] = {**_PRODUCTS, **_OTHERS}
_SDPA = "_scaled_dot_product"
_RESHAPED = ("view", "_unsafe_view", "_reshape_alias", "view_copy")
_FAR = 1 << 40
"""Strides that no step along another dim comes near."""


def is_product(func: OpOverload) -> bool:
    """Return whether every element of one operand meets all elements of another."""
    return func.overloadpacket.__name__ in _PRODUCTS


def is_pointwise(func: OpOverload) -> bool:
    """Return whether an operation goes element by element, over operands that are broadcast."""
    return torch.Tag.pointwise in func.tags


def arguments(func: OpOverload, *, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name, defaults included."""
    named = func._schema.arguments
    given = {argument.name: argument.default_value for argument in named if argument.has_default_value()}
    return given | {argument.name: value for argument, value in zip(named, args, strict=False)} | dict(kwargs)


def after(
    func: OpOverload, *, operand: str, x: Tensor, pieces: Sequence[SplitDim], given: Arguments, made: Tensor
) -> list[SplitDim]:
    """Return where the result `made` is split because the operand `x` is. Raises MixedError."""
    name = func.overloadpacket.__name__
    if name in _RESHAPED and "size" in given:
        return list(_reshaped(pieces, x=x, made=made, size=given["size"]))
    if func.is_view:
        return list(_viewed(pieces, func=func, operand=operand, x=x, given=given))
    dims = (
        ()
        if is_pointwise(func)
        else _mixed(name, operand=operand, x=x, given=given, reduces=torch.Tag.reduction in func.tags)
    )
    if dims is None:
        if x.dim() and not made.dim() and name not in _CHECKS:
            raise MixedFeaturesError
        return list(pieces) if made.shape == x.shape else []
    if any(piece.dim in dims for piece in pieces):
        raise MixedFeaturesError
    new = given.get("dim") if name == "stack" else None
    return list(_aligned(pieces, x=x, made=made, dims=dims, new=new))


def _mixed(name: str, *, operand: str, x: Tensor, given: Arguments, reduces: bool) -> Sequence[int] | None:
    """Return the dims of an operand that an operation mixes, counted from 0; None where it is not known."""
    known = _MIXES.get(name) or (_ATTENTION if name.startswith(_SDPA) else None)
    named = [given[word] for word in ("dim", "dims") if word in given]
    if known is not None:
        dims: Sequence[int] = known[operand](x, given) if operand in known else ()
    elif name in _CHECKS or not (named or reduces):
        return None
    else:
        said = (named[0],) if named and isinstance(named[0], int) else named and named[0]
        dims = said or range(x.dim())
    return [dim % x.dim() for dim in dims if -x.dim() <= dim < x.dim()]


def _aligned(
    pieces: Sequence[SplitDim], *, x: Tensor, made: Tensor, dims: Sequence[int], new: int | None
) -> Iterator[SplitDim]:
    """Yield the split dims of a result that has the dims of `x`, less those that it mixes, and maybe others in
    front.
    """
    for piece in pieces:
        dim = piece.dim + made.dim() - x.dim()
        if dims and made.dim() == x.dim() - len(dims):
            dim = piece.dim - sum(mixed < piece.dim for mixed in dims)
        if new is not None:
            dim = piece.dim + (piece.dim >= new % made.dim())
        if 0 <= dim < made.dim() and made.size(dim) == x.size(piece.dim):
            yield piece._replace(dim=dim)


def _reshaped(pieces: Sequence[SplitDim], *, x: Tensor, made: Tensor, size: Sequence[int]) -> Iterator[SplitDim]:
    """Yield the split dims of the same elements in the same order. A dim that is cut into several is a part along each,
    unless the first is as large as comes out of it.
    """
    for piece in pieces:
        low = piece.step * math.prod(x.shape[piece.dim + 1 :])
        high = low * piece.places
        found = []
        for dim, count in enumerate(made.shape):
            step = math.prod(made.shape[dim + 1 :])
            begin, end = max(low, step), min(high, step * count)
            if begin < end:
                found.append(SplitDim(dim, begin // step, end // begin))
        yield from found[:1] if found and size[found[0].dim] == -1 else found


def _viewed(
    pieces: Sequence[SplitDim], *, func: OpOverload, operand: str, x: Tensor, given: Arguments
) -> Iterator[SplitDim]:
    """Yield the split dims of a view, found with a tensor without memory whose strides tell its dims apart."""
    if func.overloadpacket.__name__ == "as_strided":
        return
    strides = [_FAR + dim for dim in range(x.dim())]
    with unseen():
        ghost = torch.empty_strided(x.shape, strides, dtype=x.dtype, device="meta")
        try:
            seen = next(tensors(func(**{**given, operand: ghost})))
        except RuntimeError:  # another dtype over the same memory
            return
    for piece in pieces:
        size = x.size(piece.dim)
        kept = [dim for dim in range(seen.dim()) if (seen.stride(dim), seen.size(dim)) == (strides[piece.dim], size)]
        if kept:
            yield piece._replace(dim=kept[0])
        elif size > 1:
            raise MixedFeaturesError

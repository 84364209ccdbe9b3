"""Tensor of logits that has the shape of the whole logits and holds this rank's part of the vocabulary.

A user's loss is written for whole logits, the largest tensor of a language model. `SplitLogits` has their shape.
Functions that do not mix classes (a view of the leading dims, a slice, a conversion) keep the logits split. The
cross-entropy and the argmax are computed from the parts. Any other function gets whole logits, gathered once, which is
correct but takes the memory of whole logits."""

from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.tensor.core.global_shape_tensor import ANSWERED_BY_PART, GlobalShapeTensor
from meshwise.tensor.core.vocab_parallel_loss import VocabularySplit, cross_entropy


class SplitLogits(GlobalShapeTensor):
    """Logits of the full shape; `local` holds this rank's classes, and autograd goes through it.

    | vocabulary          the split of the classes over ranks
    | dim_of_vocabulary   the dim of the classes, 0 or more
    | altered             True after an in-place write; the logits are then gathered, and functions use the whole ones
    | derived             True for a view or conversion of other logits, which may share memory with them"""

    vocabulary: VocabularySplit
    dim_of_vocabulary: int
    altered: bool
    derived: bool
    too_late = "{} got logits that are split over the vocabulary; give it a gathered copy: logits + 0"
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, *, vocabulary: VocabularySplit, dim: int = -1) -> "SplitLogits":
        """Return split logits with this rank's part `local`, whose classes lie along `dim`."""
        shape = list(local.shape)
        shape[dim] = vocabulary.size
        self = cls.over(local, shape=shape)
        self.vocabulary = vocabulary
        self.dim_of_vocabulary = dim % local.dim()
        self.altered = False
        self.derived = False
        self._whole = None
        return self

    def whole(self) -> Tensor:
        """Return the whole logits as a plain tensor, equal on all ranks of the vocabulary; the first call gathers."""
        if self._whole is None:
            words, dim = self.vocabulary, self.dim_of_vocabulary
            parts = gradient.replicate(self.local, world=words.world, axes=words.axes, dim=dim, sizes=words.sizes)
            self._whole = parts.wait()
        return self._whole

    def write(self, func: Any) -> None:
        """Mark the logits as altered before `func` writes to them. Raises RuntimeError for a view or conversion."""
        if self.derived:
            raise RuntimeError(
                f"{func.__name__} would write into a view or conversion of split logits; "
                "write into the output of the head, or into a gathered copy: logits + 0"
            )
        self.altered = True

    def like(self, local: Tensor, *, dim: int | None = None) -> "SplitLogits":
        """Return logits derived from these, with part `local` and the classes along `dim`; None: the same dim."""
        other = SplitLogits(local, vocabulary=self.vocabulary, dim=self.dim_of_vocabulary if dim is None else dim)
        other.derived = True
        return other

    @classmethod
    def answer(cls, func: Any, *, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Return a result that stays split if `func` allows it, else the result for the whole logits."""
        first = args[0] if args else given.get("input")
        if isinstance(first, SplitLogits):
            if func in ANSWERED_BY_PART:
                return func(first.local, *args[1:], **given)
            handler = None if first.altered else _STAYS_SPLIT.get(func)
            result = handler(first, func, args[1:], given) if handler else None
            if result is not None:
                return result
            if _writes(func):
                first.write(func)
        args, given = pytree.tree_map_only(SplitLogits, SplitLogits.whole, (args, given))
        return func(*args, **given)


def _writes(func: Any) -> bool:
    """Return whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", *_IN_PLACE)
    return name.endswith("_")


# ---- handlers of functions on split logits: (logits, function, other arguments, keyword arguments) to a result -------
# A handler returns None if these arguments need whole logits.


def _element_by_element(x: SplitLogits, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> SplitLogits | None:
    if any(isinstance(value, Tensor) for value in (*args, *given.values())):
        return None
    return x.like(func(x.local, *args, **given))


def _reshaped(x: SplitLogits, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> SplitLogits | None:
    """Return logits of another shape, if the classes stay alone in the last dim."""
    shape = given.get("shape", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
    if isinstance(shape, torch.dtype) or x.dim_of_vocabulary != x.dim() - 1 or len(given) > ("shape" in given):
        return None
    *leading, last = torch.empty(x.shape, device="meta").reshape(tuple(shape)).shape
    if last != x.vocabulary.size:
        return None
    return x.like(func(x.local, (*leading, x.local.size(-1))), dim=-1)


def _flattened(x: SplitLogits, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> SplitLogits | None:
    start, end = (*args, *([0, -1][len(args) :]))[:2]
    start, end = given.get("start_dim", start) % x.dim(), given.get("end_dim", end) % x.dim()
    if start <= x.dim_of_vocabulary <= end and start != end:
        return None
    moved = end - start if x.dim_of_vocabulary > end else 0
    return x.like(func(x.local, start, end), dim=x.dim_of_vocabulary - moved)


def _transposed(x: SplitLogits, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> SplitLogits | None:
    one, other = (given.get(name, dim) % x.dim() for name, dim in zip(("dim0", "dim1"), (*args, 0, 0), strict=False))
    exchanged = {one: other, other: one}
    return x.like(func(x.local, one, other), dim=exchanged.get(x.dim_of_vocabulary, x.dim_of_vocabulary))


def _permuted(x: SplitLogits, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> SplitLogits | None:
    dims = given.get("dims", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
    return x.like(func(x.local, tuple(dims)), dim=[dim % x.dim() for dim in dims].index(x.dim_of_vocabulary))


def _indexed(x: SplitLogits, func: Any, args: tuple[Any, ...], _given: dict[str, Any]) -> SplitLogits | None:
    """Return indexed logits, if the classes are the last dim and the index selects from the dims before it."""
    index = args[0] if isinstance(args[0], tuple) else args
    if x.dim_of_vocabulary != x.dim() - 1 or not all(
        isinstance(i, int | slice | Tensor | EllipsisType | None) for i in index
    ):
        return None
    takes = [i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else int(i is not None) for i in index]
    dims = sum(0 if i is Ellipsis else count for i, count in zip(index, takes, strict=True))
    reaches = any(i is Ellipsis for i in index) or dims == x.dim()
    if reaches and index[-1] is not Ellipsis and index[-1] != slice(None):
        return None
    return x.like(func(x.local, index), dim=-1)


def _largest(x: SplitLogits, _func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor | None:
    """Return the argmax over all classes: the first index among equal maxima, as in one process."""
    dim = given.get("dim", args[0] if args else None)
    if dim is None or dim % x.dim() != x.dim_of_vocabulary or len(args) > 1 or "keepdim" in given:
        return None
    local, words = x.local.detach().movedim(dim, -1), x.vocabulary
    value, index = local.max(-1)
    own = torch.stack((value.double(), (index + words.first).double()))
    parts = own.new_empty(len(words.sizes), *own.shape)
    words.world.all_gather(own, into=parts, axes=words.axes).wait()
    return parts[:, 1].gather(0, parts[:, 0].argmax(0, keepdim=True))[0].long()


def _cross_entropy(x: SplitLogits, _func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor | None:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **given}
    target = given.pop("target")
    legacy = [given.pop(name, None) for name in ("size_average", "reduce")]
    if x.dim_of_vocabulary != min(1, x.dim() - 1) or target.is_floating_point() or legacy != [None, None]:
        return None
    local = x.local.movedim(x.dim_of_vocabulary, -1)
    return cross_entropy(local, target=target, vocabulary=x.vocabulary, **given)


_IN_PLACE = tuple(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))
_STAYS_SPLIT: Mapping[Any, Callable[[SplitLogits, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(
        (getattr(Tensor, name) for name in ("float", "double", "half", "bfloat16", "to", "contiguous", "clone")),
        _element_by_element,
    ),
    **dict.fromkeys(
        (getattr(Tensor, name) for name in ("detach", "mul", "div", "__mul__", "__truediv__", "__rmul__", "tanh")),
        _element_by_element,
    ),
    **dict.fromkeys((torch.mul, torch.div, torch.tanh, torch.clone), _element_by_element),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshaped),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flattened),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.swapaxes), _transposed),
    **dict.fromkeys((Tensor.permute, torch.permute), _permuted),
    **dict.fromkeys((Tensor.argmax, torch.argmax), _largest),
    Tensor.__getitem__: _indexed,
    functional.cross_entropy: _cross_entropy,
}

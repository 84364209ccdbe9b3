"""Tensors that are split over the vocabulary: logits, their cross-entropy, and the embedding's table as a matrix.

The user's code was written for whole tensors. So it gets a `GlobalShapeTensor`, which has the shape of the whole tensor
and holds this rank's part. Its class decides how a torch function uses the part.

`SplitLogits`: functions that do not mix classes (a view of the leading dims, a slice, a conversion) keep the logits
split. The cross-entropy is computed from the parts. Any other function gets whole logits, gathered once. This is
correct, but whole logits are the largest tensor of a language model.

`TableWeight`: a forward may compute the logits with the embedding's weight, as in `x @ self.embedding.weight.T`. So
while the model runs, a split embedding returns its weight as a `TableWeight`. Its product with the hidden states is a
`SplitLogits`. Other functions of its values raise ValueError, because a rank has only a part of the table.

Cross-entropy: each rank computes two numbers per token from its classes (three with label smoothing). One all-gather
exchanges them, and the logits are not sent: docs/tensor.md has the formula ("Communication")."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils import _pytree as pytree

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.model.torch_private import without_dispatch_modes

_BLOCK = 256 << 10
"""Elements that are processed at a time on a CPU."""
_GPU_BLOCK = 1 << 25
"""Elements that are processed at a time on a GPU."""


@dataclass(frozen=True)
class DimShards:
    """Split of a dim over `axes`, such as classes or features; `sizes`: size of each rank's part, in group order."""

    world: World
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Size of the dim over all ranks."""
        return sum(self.sizes)

    @property
    def first(self) -> int:
        """Index of the first element of this rank's part."""
        return sum(self.sizes[: self.world.group(self.axes).index])


def require_valid(numbers: Tensor, *, valid: Tensor, problem: str) -> None:
    """Raise IndexError with the text `problem`, in which {} is the first number that is not `valid`.

    On CUDA a device-side assertion fails instead; on meta, where numbers have no values, nothing is checked."""
    if numbers.device.type == "cuda":
        torch._assert_async(valid.all())
    elif not numbers.is_meta and not bool(valid.all()):
        raise IndexError(problem.format(int(numbers[~valid][0])))


class _CrossEntropy(torch.autograd.Function):
    """Autograd function of the losses (…), from logits (…, local classes), target classes and counts (0: ignored)."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, classes: Tensor, counts: Tensor, vocabulary: DimShards, smoothing: float
    ) -> Tensor:
        own = classes - vocabulary.first
        here = (own >= 0) & (own < local.size(-1))
        own = own.masked_fill(~here, 0)
        at_target = local.gather(-1, own[..., None])[..., 0]
        numbers = [_log_sum(local), at_target.to(counts.dtype).masked_fill(~here, 0)]
        if smoothing:
            numbers.append(local.to(counts.dtype).sum(-1))
        parts = counts.new_empty(len(vocabulary.sizes), len(numbers), *classes.shape)
        vocabulary.world.all_gather(torch.stack(numbers), into=parts, axes=vocabulary.axes).wait()
        log_sum = parts[:, 0].logsumexp(0)
        losses = (1 - smoothing) * counts * (log_sum - parts[:, 1].sum(0))
        if smoothing:
            losses += smoothing * counts * (log_sum - parts[:, 2].sum(0) / vocabulary.size)
        ctx.hit, ctx.even = 1 - smoothing, smoothing / vocabulary.size
        ctx.save_for_backward(local, own, here, counts, log_sum)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        local, own, here, counts, log_sum = ctx.saved_tensors
        each = gradient * counts
        result = _softmax_times(local, log_sum, factor=each)
        result.scatter_add_(-1, own[..., None], -(ctx.hit * each * here)[..., None].to(result.dtype))
        if ctx.even:
            result -= (ctx.even * each)[..., None].to(result.dtype)
        return result, None, None, None, None


def _log_sum(local: Tensor) -> Tensor:
    """Return log Σ exp over the last dim, at least in float32; works in blocks of rows to save memory."""
    rows = local.reshape(-1, local.size(-1))
    result = rows.new_empty(rows.size(0), dtype=_wide(local.dtype))
    for part in _blocks(rows):
        result[part] = rows[part].to(result.dtype).logsumexp(-1)
    return result.view(local.shape[:-1])


def _softmax_times(local: Tensor, log_sum: Tensor, *, factor: Tensor) -> Tensor:
    """Return factor · exp(local - log_sum); `factor` and `log_sum` have one number per row of `local`."""
    rows = local.reshape(-1, local.size(-1))
    result = torch.empty_like(rows)
    log_sums, factors = log_sum.reshape(-1, 1), factor.reshape(-1, 1)
    for part in _blocks(rows):
        torch.mul((rows[part] - log_sums[part]).exp_(), factors[part], out=result[part])
    return result.view(local.shape)


def _blocks(rows: Tensor) -> list[slice]:
    """Return slices of rows: on a CPU small enough for its cache, on a GPU large enough to fill the device."""
    step = max(1, (_BLOCK if rows.is_cpu else _GPU_BLOCK) // max(1, rows.size(1)))
    return [slice(start, start + step) for start in range(0, rows.size(0), step)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cuda")
_METHODS = (
    *("size", "dim", "numel", "nelement", "element_size", "__len__", "ndimension"),
    *("is_floating_point", "is_complex", "get_device"),
)
_ABOUT = frozenset({*(getattr(Tensor, n).__get__ for n in _PROPERTIES), *(getattr(Tensor, n) for n in _METHODS)})
"""Functions that return shape, dtype or device, and compute nothing."""

ANSWERED_BY_PART = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "_version")),
        *(getattr(Tensor, name) for name in ("register_hook", "is_contiguous")),
    }
)
"""Functions whose result for the global tensor is the result for this rank's part."""


class GlobalShapeTensor(Tensor):
    """Tensor of the global shape without memory; the method `answer` of a subclass defines its functions.

    | local      this rank's part
    | too_late   error message for a function that reaches the tensor below autograd; {} is the function"""

    local: Tensor
    too_late: str

    @classmethod
    def over(cls, local: Tensor, *, shape: Sequence[int]) -> Self:
        """Return a tensor of the global `shape` that holds `local` as this rank's part."""
        self: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        self.local = local
        return self

    @classmethod
    def answer(cls, func: Any, *, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Return the result of torch function `func`, called with `args` and keyword arguments `given`."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape, own = tuple(self.shape), tuple(self.local.shape)
        return f"{type(self).__name__}({shape}, this rank has {own}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return shape, dtype or device of the global tensor if `func` asks for them, else the result of `answer`."""
        given = dict(kwargs or {})
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        return cls.answer(func, args=args, given=given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise RuntimeError, because below autograd no function can use the local part instead of this tensor."""
        raise RuntimeError(cls.too_late.format(func))


class SplitLogits(GlobalShapeTensor):
    """Logits of the full shape; `local` holds this rank's classes, and autograd goes through it.

    | vocabulary          the split of the classes over ranks
    | dim_of_vocabulary   index of the dim of the classes, never negative
    | altered             True after an in-place write; the logits are then gathered, and functions use the whole ones
    | derived             True for a view or conversion of other logits, which may share memory with them"""

    vocabulary: DimShards
    dim_of_vocabulary: int
    altered: bool
    derived: bool
    too_late = "{} got logits that are split over the vocabulary; give it a gathered copy: logits + 0"
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, *, vocabulary: DimShards, dim: int = -1) -> "SplitLogits":
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
    with without_dispatch_modes():  # so a rehearsal does not count this tensor
        *leading, last = torch.empty(x.shape, device="meta").reshape(tuple(shape)).shape
    if last != x.vocabulary.size:
        return None
    return x.like(func(x.local, (*leading, x.local.size(-1))), dim=-1)


def _moved(x: SplitLogits, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> SplitLogits | None:
    """Return logits whose dims change places or merge, if the classes stay a dim of their own."""
    with without_dispatch_modes():  # in a tensor of two elements per dim, the strides tell the dims apart
        result = func(torch.empty((2,) * x.dim(), device="meta"), *args, **given)
    dims = list(zip(result.size(), result.stride(), strict=True))
    classes = (2, 2 ** (x.dim() - 1 - x.dim_of_vocabulary))
    return x.like(func(x.local, *args, **given), dim=dims.index(classes)) if classes in dims else None


def _indexed(x: SplitLogits, func: Any, args: tuple[Any, ...], _given: dict[str, Any]) -> SplitLogits | None:
    """Return indexed logits, if the classes are the last dim and the index selects from the dims before it."""
    index = args[0] if isinstance(args[0], tuple) else args
    selects = all(isinstance(i, int | slice | Tensor | EllipsisType | None) for i in index)
    if x.dim_of_vocabulary != x.dim() - 1 or not selects:
        return None
    takes = [i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else int(i is not None) for i in index]
    dims = sum(0 if i is Ellipsis else count for i, count in zip(index, takes, strict=True))
    reaches = any(i is Ellipsis for i in index) or dims == x.dim()
    if reaches and index[-1] is not Ellipsis and index[-1] != slice(None):
        return None
    return x.like(func(x.local, index), dim=-1)


def _cross_entropy(x: SplitLogits, _func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor | None:
    """Return the cross-entropy in nats; None for class weights, probabilities as targets, and what torch refuses.

    Raises IndexError for a target that is no class; on CUDA a device-side assertion fails instead."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {"reduction": "mean", **dict(zip(names, args, strict=False)), **given}
    target, reduction, vocabulary = given["target"], given["reduction"], x.vocabulary
    local = x.local.movedim(x.dim_of_vocabulary, -1)
    whole = target.is_floating_point() or reduction not in ("none", "mean", "sum") or local.shape[:-1] != target.shape
    unusual = any(given.get(name) is not None for name in ("weight", "size_average", "reduce"))
    if whole or unusual or x.dim_of_vocabulary != min(1, x.dim() - 1):
        return None
    counted = target != given.get("ignore_index", -100)
    if not target.is_meta:  # a rehearsal does not count the check
        valid = ((target >= 0) & (target < vocabulary.size)) | ~counted
        require_valid(target, valid=valid, problem=f"target {{}} is out of bounds for {vocabulary.size} classes")
    classes, counts = target.masked_fill(~counted, 0), counted.to(_wide(local.dtype))
    losses: Tensor = _CrossEntropy.apply(local, classes, counts, vocabulary, given.get("label_smoothing", 0.0))
    if reduction == "none":
        return losses.to(local.dtype)
    total = losses.sum()
    return (total if reduction == "sum" else total / counts.sum()).to(local.dtype)


_IN_PLACE = tuple(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))
_ELEMENT_METHODS = "float double half bfloat16 to contiguous clone detach mul div __mul__ __truediv__ __rmul__ tanh"
_STAYS_SPLIT: Mapping[Any, Callable[[SplitLogits, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys((getattr(Tensor, name) for name in _ELEMENT_METHODS.split()), _element_by_element),
    **dict.fromkeys((torch.mul, torch.div, torch.tanh, torch.clone), _element_by_element),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshaped),
    **dict.fromkeys((Tensor.flatten, torch.flatten, Tensor.permute, torch.permute), _moved),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.swapaxes), _moved),
    Tensor.__getitem__: _indexed,
    functional.cross_entropy: _cross_entropy,
}


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

    | table        `SplitTable` of the embedding: name, shape (rows, features) of the full table, head
    | transposed   True if the tensor is the transposed table, (features, rows)"""

    table: Any
    transposed: bool
    too_late = "{} got a table that is split over the ranks; call the embedding, or multiply with its weight"

    @staticmethod
    def __new__(cls, local: Tensor, *, table: Any, transposed: bool = False) -> "TableWeight":
        """Return a table with this rank's part `local`, which is never transposed."""
        self = cls.over(local, shape=table.shape[::-1] if transposed else table.shape)
        self.table, self.transposed = table, transposed
        return self

    @classmethod
    def answer(cls, func: Any, *, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Return logits, the transposed or converted table, or a property of it; ValueError for other functions."""
        if func is functional.linear:
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **given}
            args = (given["input"], given["weight"])
        first, second = (*args, None, None)[:2]
        if isinstance(first, TableWeight):
            if func in _TRANSPOSES:
                return TableWeight(first.local, table=first.table, transposed=not first.transposed)
            if func in _CONVERSIONS:
                converted = func(first.local, *args[1:], **given)
                return TableWeight(converted, table=first.table, transposed=first.transposed)
            if func in ANSWERED_BY_PART:
                return func(first.local, *args[1:], **given)
        elif isinstance(second, TableWeight):
            if func is functional.linear and not second.transposed:
                logits, bias = second.table.head.logits(first, weight=second.local), given.get("bias")
                return logits if bias is None else logits + bias
            if func in _PRODUCTS and second.transposed:
                return second.table.head.logits(first, weight=second.local)
        table = next(one.table for one in pytree.tree_leaves((args, given)) if isinstance(one, TableWeight))
        raise ValueError(
            f"the forward uses an embedding's weight of {table.shape[0]} rows in {getattr(func, '__name__', func)}, "
            "but tp splits the rows over ranks. Call the embedding, or multiply with its weight, or keep it whole by a "
            f'rule, as in {{"{table.name}": "whole"}}'
        )

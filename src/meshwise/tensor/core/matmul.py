"""Multiply sharded matrices: gather the operands, multiply them, reduce the product; every scheme uses this matmul.

    Y = X · W        gather X, gather W, multiply, reduce Y

        dY ── gather, if Y was scattered ─┬─ dX = dY · Wᵀ ── reduce, if X was gathered      starts first, and runs
                                          └─ dW = Xᵀ · dY ── reduce, if W was gathered      while dW is computed

If ranks sum a product, it is written into a tensor of `World.empty_for_reduce`, which the all-reduce reads fastest.

W may have a leading dim of experts. Then X has this dim too, and each expert multiplies its own rows: (experts, rows,
K) by (experts, out, in).

Several products may read one X, as q, k and v do. Then X is gathered once for all of them, and once more in the
backward (`InputGather`). The gradients of X are added before they are sent.

The backward may be run in two parts, for dX and for dW. Each part gathers the operand that it multiplies: W for dX, X
for dW. Both gather dY if Y was scattered. Until dW is computed, a rank keeps its own parts of dY and X."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.model.forward import ForwardReplay, same_memory
from meshwise.model.torch_private import needed_gradients
from meshwise.precision.dtype_policy import product_dtype

Finish: TypeAlias = Callable[[], Tensor]
"""Function that waits for a collective and returns its result."""


@dataclass(frozen=True)
class OperandMove:
    """Collective on one operand over `axes`; () means no collective.

    | dim     the dim that the axes split; None if all ranks have an equal operand, whose gradient is summed
    | sizes   sizes of the ranks' parts along `dim`, in group order; None for equal sizes"""

    axes: tuple[str, ...] = ()
    dim: int | None = None
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class MatmulCollectives:
    """Collectives and options of one product Y = X·W on this rank.

    | x, w, y       the gather of X, the gather of W, the reduction of Y
    | input_dim     the dim of K in the stored weight: -1 as in nn.Linear, or -2
    | keeps         True: keep gathered operands for the backward, which saves the second gather and takes memory
    | recall        keeps the result for a forward that is repeated"""

    world: World
    x: OperandMove
    w: OperandMove
    y: OperandMove
    input_dim: int = -1
    keeps: bool = False
    recall: ForwardReplay = dataclasses.field(default_factory=ForwardReplay)


class InputGather:
    """Gather of an X that several products read, made once in the backward for all of them."""

    def __init__(self, world: World, *, moved: OperandMove) -> None:
        self._world = world
        self.moved = moved
        self.readers = 0
        """Number of products that will need X in their backward."""
        self._left = 0
        self._arriving: Finish | None = None

    def regather(self, stored: Tensor) -> Finish:
        """Return a function that waits for the gather of `stored`. The first call starts it, the last releases it."""
        if self._arriving is None:
            self._arriving = _gather(_ready(stored), self.moved, world=self._world)
            self._left = self.readers
        arriving = self._arriving
        self._left -= 1
        if not self._left:
            self._arriving = None
        return arriving


@dataclass(frozen=True)
class MatmulInput:
    """Input X of a product, gathered already or to be gathered by the product.

    | value       X to multiply, or this rank's part if the product itself gathers X
    | stored      this rank's part of X, kept for the backward instead of `value`; None: `value` is kept
    | gathering   the gather of `stored` in the backward, which all readers of X share; None if `stored` is None"""

    value: Tensor
    stored: Tensor | None = None
    gathering: InputGather | None = None


def matmul(x: MatmulInput, *, weight: Tensor, bias: Tensor | None = None, operation: MatmulCollectives) -> Tensor:
    """Return this rank's part of X·W plus the bias: (…, local K) times (local out, local K) to (…, local out).

    With experts: (local experts, rows, local K) times (local experts, local out, local K) to (local experts, rows,
    local out). Gradients have the shapes of the stored parts. The bias's gradient is the sum over this rank's rows of Y
    only. Under autocast, operands are converted before they are sent. Raises ValueError for sizes that do not fit."""
    value, weight = to_product_dtype(x.value), to_product_dtype(weight)
    bias = None if bias is None else to_product_dtype(bias)
    kept = x if x.stored is None or x.stored.dtype == value.dtype else MatmulInput(value)
    result: Tensor = _Multiply.apply(value, weight, bias, operation, kept)
    return result


def to_product_dtype(x: Tensor) -> Tensor:
    """Return the operand in the dtype of products, or unchanged if none is set."""
    dtype = product_dtype(x.device.type)
    return x if dtype is None else x.to(dtype)


def multiply(
    x: Tensor, *, weight: Tensor, bias: Tensor | None, operation: MatmulCollectives
) -> tuple[Tensor, list[Tensor]]:
    """Return this rank's part of X·W plus the bias, and the gathered operands if `operation` keeps them."""
    first = not operation.y.axes or operation.world.group(operation.y.axes).index == 0
    added = bias if first else None  # if ranks sum Y, only the first rank adds the bias
    kept: list[Tensor] = []

    def compute() -> Tensor:
        x_coming, w_coming = _operands(_ready(x), _ready(weight), x=operation.x, w=operation.w, operation=operation)
        x_whole, w_whole = x_coming(), w_coming()
        kept.extend([x_whole, w_whole] if operation.keeps else [])
        y = _product(x_whole, w_whole, bias=added, summed=operation.y, world=operation.world)
        return _reduce(y, operation.y, world=operation.world)()

    return compute() if operation.keeps else operation.recall.once(compute), kept


def multiply_backward(
    dy: Tensor,
    *,
    saved: Sequence[Tensor],
    operation: MatmulCollectives,
    needed: Sequence[bool],
    gathering: InputGather | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of X, W and the bias, each only if `needed`. saved: X and W, and the gathered operands if
    they were kept. gathering: of X, if X is this rank's part of what several products read."""
    x, weight, *kept = (_ready(tensor) for tensor in saved)
    for_x, for_w, for_bias = needed
    arriving = _gather(_ready(dy), operation.y if for_x or for_w else OperandMove(), world=operation.world)
    whole = x if gathering is None or not for_w else gathering.regather(x())
    own, d_bias, experts = dy, None, weight().dim() == 3
    if for_bias and operation.y.dim is not None:  # while dy arrives
        d_bias = _rows_of(own, experts=experts).sum(-2)
    dy = arriving()
    x_moved, w_moved = operation.x if for_w else OperandMove(), operation.w if for_x else OperandMove()
    x_coming, w_coming = kept or _operands(whole, weight, x=x_moved, w=w_moved, operation=operation)
    dx = dw = None
    if for_x:
        partial = _product(dy, w_coming().mT.conj(), summed=operation.x, world=operation.world)
        dx = _reduce(partial, operation.x, world=operation.world)
    if for_bias and d_bias is None:
        d_bias = _rows_of(own, experts=experts).sum(-2)
    operation.world.progress()  # other ranks have sent their dx by now, so this does not wait
    if for_w:
        partial = _outer(x_coming().conj(), dy, input_dim=operation.input_dim, experts=experts)
        dw = _reduce(partial, operation.w, world=operation.world)
    return dx and dx(), dw and dw(), d_bias


class _Multiply(torch.autograd.Function):
    """Autograd function of the matmul; the module docstring shows forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operation: MatmulCollectives, operand: MatmulInput
    ) -> Tensor:
        y, kept = multiply(x, weight=weight, bias=bias, operation=operation)
        ctx.operation = operation
        ctx.gathering = operand.gathering if ctx.needs_input_grad[1] else None
        if ctx.gathering is not None:
            ctx.gathering.readers += 1
        ctx.save_for_backward(x if operand.stored is None else operand.stored, weight, *kept)
        return same_memory(y)  # no view, so that the model may write to it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        needed = needed_gradients(ctx)[:3]
        gradients = multiply_backward(
            dy, saved=ctx.saved_tensors, operation=ctx.operation, needed=needed, gathering=ctx.gathering
        )
        return *gradients, None, None


def _operands(
    left: Finish, weight: Finish, *, x: OperandMove, w: OperandMove, operation: MatmulCollectives
) -> tuple[Finish, Finish]:
    """Start to gather X and W, and return functions that wait for X and for W (out, in)."""
    x_coming = _gather(left, x, world=operation.world)
    w_coming = _gather(weight, w, world=operation.world)
    return x_coming, w_coming if operation.input_dim == -1 else lambda: w_coming().mT


def _ready(x: Tensor) -> Finish:
    """Return a function that returns `x`, for an operand without a collective."""
    return lambda: x


def _gather(part: Finish, moved: OperandMove, *, world: World) -> Finish:
    """Start the gather of an operand, and return the function that waits for it."""
    if not moved.axes or moved.dim is None:
        return part
    return gradient.all_gather(part(), world=world, axes=moved.axes, dim=moved.dim, sizes=moved.sizes).wait


def _product(x: Tensor, w: Tensor, *, bias: Tensor | None = None, summed: OperandMove, world: World) -> Tensor:
    """Return X·W plus the bias, for W (…, out, in); if ranks all-reduce it, in a `World.empty_for_reduce` tensor."""
    experts = w.dim() == 3
    if not summed.axes or summed.dim is not None:
        if experts:
            return x @ w.mT if bias is None else torch.baddbmm(bias[:, None], x, w.mT)
        return functional.linear(x, w, bias)
    y = world.empty_for_reduce((*x.shape[:-1], w.size(-2)), dtype=x.dtype)
    rows, into = _rows_of(x, experts=experts), _rows_of(y, experts=experts)
    if bias is None:
        torch.matmul(rows, w.mT, out=into)
    elif experts:
        torch.baddbmm(bias[:, None], rows, w.mT, out=into)
    else:
        torch.addmm(bias, rows, w.mT, out=into)
    return y


def _rows_of(x: Tensor, *, experts: bool) -> Tensor:
    """Return (…, features) as (rows, features), and (experts, rows, features) as it is."""
    return x if experts else x.flatten(0, -2)


def _reduce(partial: Tensor, moved: OperandMove, *, world: World) -> Finish:
    """Start to sum `partial`, which may be overwritten, and return the function that waits for this rank's part."""
    if not moved.axes:
        return lambda: partial
    if moved.dim is not None:
        return gradient.reduce_scatter(partial, world=world, axes=moved.axes, dim=moved.dim, sizes=moved.sizes).wait
    total = partial.contiguous()
    return gradient.after(world.all_reduce(total, axes=moved.axes), world=world, result=lambda: total)


def _outer(x: Tensor, dy: Tensor, *, input_dim: int, experts: bool) -> Tensor:
    """Return Xᵀ · dY, with the dims in the order of the stored weight."""
    one, other = (dy, x) if input_dim == -1 else (x, dy)
    return _rows_of(one, experts=experts).mT @ _rows_of(other, experts=experts)

"""Multiply sharded matrices: gather the operands, multiply them, reduce the product; every scheme uses this matmul.

    Y = X · W        gather X, gather W, multiply, reduce Y

        dY ── gather, if Y was scattered ─┬─ dX = dY · Wᵀ ── reduce, if X was gathered      starts first, and runs
                                          └─ dW = Xᵀ · dY ── reduce, if W was gathered      while dW is computed

Operands may be gathered by panels of the inner dim K (SUMMA). Matching panels of X and W are gathered while the
previous panels are multiplied, so no rank ever holds a whole gathered operand. Panels do not change the layout of the
result; so they are an option (`Streaming`), not a scheme.

        X  ┌──┬──┬──┐     W ├────┤ panel 0          Y += X[:, panel] · W[panel, :]        gather panel p+1
           │ 0│ 1│ 2│       ├────┤ panel 1
           └──┴──┴──┘       ├────┤ panel 2

If ranks sum a product, it is written into a tensor of `World.empty_for_reduce`, which the all-reduce reads fastest.

W may have a leading dim of experts. Then X has this dim too, and each expert multiplies its own rows: (experts, rows,
K) by (experts, out, in).

Several products may read one X, as q, k and v do. Then X is gathered once for all of them. A rank keeps only its own
part of X, so the backward gathers X once more for all weight gradients (`InputGather`). The gradients of X are added
before they are sent. So the traffic equals the traffic of one product with all columns of W.

The backward may be run in two parts, for dX and for dW. Each part gathers the operand that it multiplies: W for dX, X
for dW. Both gather dY if Y was scattered. Until dW is computed, a rank keeps its own parts of dY and X.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meshwise.base.mesh import even_split
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.model.forward_replay import ForwardReplay, same_memory
from meshwise.model.torch_private import needed_gradients

Finish: TypeAlias = Callable[[], Tensor]
"""Function that waits for a collective and returns its result."""
Panel: TypeAlias = tuple[int, int]
"""Start and stop of a range of K."""


@dataclass(frozen=True)
class Streaming:
    """Options of the gathers of a product.

    | keep     keep gathered operands for the backward: saves the second gather, needs memory for whole operands
    | panels   number of panels of K; 1 gathers whole operands before the product
    """

    keep: bool = False
    panels: int = 1


@dataclass(frozen=True)
class OperandMove:
    """Collective on one operand over `axes`; () means no collective.

    | dim     the dim that the axes split; None if all ranks have an equal operand, whose gradient is summed
    | sizes   sizes of the ranks' parts along `dim`, in group order; None for equal sizes
    """

    axes: tuple[str, ...] = ()
    dim: int | None = None
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class MatmulCollectives:
    """Collectives and options of one product Y = X·W on this rank.

    | x, w, y    the gather of X, the gather of W, the reduction of Y
    | features   size of K in the product on this rank
    | within     the dim of K in the stored weight: -1 as in nn.Linear, or -2
    | recall     keeps the result for a forward that is repeated
    """

    world: World
    x: OperandMove
    w: OperandMove
    y: OperandMove
    features: int
    within: int = -1
    streaming: Streaming = dataclasses.field(default_factory=Streaming)
    recall: ForwardReplay = dataclasses.field(default_factory=ForwardReplay)

    @property
    def panels(self) -> list[Panel]:
        """Panels of K, in order: at most `streaming.panels`."""
        return even_split(self.features, max(1, min(self.streaming.panels, self.features)))

    def x_panel(self, panel: Panel) -> "_Slice":
        """Return the slice of a panel of X that this rank stores."""
        return _Slice.along(self.world, self.x, panel, dim=-1)

    def w_panel(self, panel: Panel) -> "_Slice":
        """Return the slice of a panel of W that this rank stores."""
        return _Slice.along(self.world, self.w, panel, dim=self.within)

    @property
    def adds_bias(self) -> bool:
        """True if this rank adds the bias to its Y. If ranks sum Y, only the first rank does."""
        return not self.y.axes or self.world.group(self.y.axes).index == 0


class InputGather:
    """Gather in the backward of an X that several products read, made once for all of them."""

    def __init__(self, world: World, *, moved: OperandMove) -> None:
        self._world = world
        self._moved = moved
        self._readers = 0
        self._left = 0
        self._arriving: Finish | None = None

    def add_reader(self) -> None:
        """Count one more product that will need X in its backward."""
        self._readers += 1

    def regather(self, stored: Tensor) -> Finish:
        """Return a function that waits for the gather of `stored`. The first call starts it, the last releases it."""
        if self._arriving is None:
            self._arriving = _gather(_there(stored), self._moved, world=self._world)
            self._left = self._readers
        arriving = self._arriving
        self._left -= 1
        if not self._left:
            self._arriving = None
        return arriving


@dataclass(frozen=True)
class MatmulInput:
    """Input X of a product; it is gathered already, or the product gathers it.

    | value       X to multiply, or this rank's part if the product itself gathers X
    | stored      this rank's part of X, kept for the backward instead of `value`; None: `value` is kept
    | gathering   the gather of `stored` in the backward; None if no other product reads X
    """

    value: Tensor
    stored: Tensor | None = None
    gathering: InputGather | None = None


@dataclass(frozen=True)
class _Slice:
    """Range of a stored operand that is this rank's part of a panel, and the gather of the panel."""

    start: int
    size: int
    moved: OperandMove

    @classmethod
    def along(cls, world: World, moved: OperandMove, panel: Panel, *, dim: int) -> "_Slice":
        """Return this rank's slice of `panel` along `dim`; `moved` is the collective of the operand."""
        start, stop = panel
        if not moved.axes or moved.dim != dim:
            return cls(start, stop - start, moved)
        assert moved.sizes is not None
        bounds = itertools.pairwise([0, *itertools.accumulate(moved.sizes)])
        shares = [(max(low, start), max(low, start, min(high, stop)), low) for low, high in bounds]
        low, high, first = shares[world.group(moved.axes).index]
        sizes = tuple(end - begin for begin, end, _ in shares)
        return cls(low - first if high > low else 0, high - low, OperandMove(moved.axes, moved.dim, sizes))

    def of(self, stored: Tensor, *, dim: int) -> Tensor:
        """Return this slice of the `stored` operand along `dim`, as a view."""
        return stored if self.size == stored.size(dim) else stored.narrow(dim, self.start, self.size)


def matmul(x: MatmulInput, *, weight: Tensor, bias: Tensor | None = None, operation: MatmulCollectives) -> Tensor:
    """Return this rank's part of X·W plus the bias: (…, local K) times (local out, local K) to (…, local out).

    With experts: (local experts, rows, local K) times (local experts, local out, local K) to (local experts, rows,
    local out). Gradients have the shapes of the stored parts. The bias's gradient is the sum over this rank's rows of Y
    only. Under autocast, operands are converted before they are sent. Raises ValueError if parts misfit `operation`.
    """
    value, weight, bias = (
        to_product_dtype(x.value),
        to_product_dtype(weight),
        None if bias is None else to_product_dtype(bias),
    )
    kept = x if x.stored is None or x.stored.dtype == value.dtype else MatmulInput(value)
    result: Tensor = _Multiply.apply(value, weight, bias, operation, kept)
    return result


def to_product_dtype(x: Tensor) -> Tensor:
    """Return the operand in autocast's dtype, or unchanged if autocast is off."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


class _Multiply(torch.autograd.Function):
    """Autograd function of the matmul; the module docstring shows forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operation: MatmulCollectives, operand: MatmulInput
    ) -> Tensor:
        added = bias if operation.adds_bias else None
        kept: list[Tensor] = []

        def multiply() -> Tensor:
            y: Tensor | None = None
            for x_coming, w_coming in _operands(_there(x), weight, operation):
                x_part, w_part = x_coming(), w_coming()
                if y is None:
                    y = _product(x_part, w_part, bias=added, summed=operation.y, world=operation.world)
                else:
                    _add_product(y, x_part, w_part)
                kept.extend([x_part, w_part] if operation.streaming.keep else [])
            assert y is not None
            return _reduce(y, operation.y, world=operation.world)()

        # The result is no view, so that the model may write to it in place.
        y = same_memory(multiply() if operation.streaming.keep else operation.recall.once(multiply))
        ctx.operation = operation
        ctx.gathering = operand.gathering if ctx.needs_input_grad[1] else None
        if ctx.gathering is not None:
            ctx.gathering.add_reader()
        ctx.save_for_backward(x if operand.stored is None else operand.stored, weight, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        operation: MatmulCollectives = ctx.operation
        x, weight, *kept = (_there(tensor) for tensor in ctx.saved_tensors)
        for_x, for_w, for_bias = needed_gradients(ctx)[:3]
        arriving = _gather(_there(dy), operation.y if for_x or for_w else OperandMove(), world=operation.world)
        whole = x if ctx.gathering is None or not for_w else ctx.gathering.regather(x())
        wanted = whole if for_w else None, weight() if for_x else None
        operands = zip(kept[::2], kept[1::2], strict=True) if kept else _operands(*wanted, operation)
        own, d_bias, experts = dy, None, weight().dim() == 3
        if for_bias and operation.y.dim is not None:  # while dy arrives
            d_bias = _rows_of(own, experts=experts).sum(-2)
        dy = arriving()
        dxs: list[Finish] = []
        dws: list[Finish] = []
        for panel, (x_coming, w_coming) in zip(operation.panels, operands, strict=True):
            if for_x:
                moved = operation.x_panel(panel).moved
                dx = _product(dy, w_coming().mT.conj(), summed=moved, world=operation.world)
                dxs.append(_reduce(dx, moved, world=operation.world))
            if for_bias and d_bias is None:
                d_bias = _rows_of(own, experts=experts).sum(-2)
            operation.world.progress()  # other ranks have sent their dx by now, so this does not wait
            if for_w:
                dw = _outer(x_coming().conj(), dy, within=operation.within, experts=experts)
                dws.append(_reduce(dw, operation.w_panel(panel).moved, world=operation.world))
        return _together(dxs, dim=-1), _together(dws, dim=operation.within), d_bias, None, None


def _operands(x: Finish | None, weight: Tensor | None, operation: MatmulCollectives) -> Iterator[tuple[Finish, Finish]]:
    """Yield functions that return X and W (out, in) of a panel, while the next one is gathered. None: not needed."""
    world, within = operation.world, operation.within

    def start(panel: Panel) -> tuple[Finish, Finish]:
        x_part = w_part = _nothing
        if x is not None:
            x_panel = operation.x_panel(panel)
            x_part = _gather(lambda: x_panel.of(x(), dim=-1), x_panel.moved, world=world)
        if weight is not None:
            w_panel = operation.w_panel(panel)
            w_part = _gather(lambda: w_panel.of(weight, dim=within), w_panel.moved, world=world)
        return x_part, w_part if within == -1 else lambda: w_part().mT

    coming = start(operation.panels[0])
    for following in [*operation.panels[1:], None]:
        here, coming = coming, start(following) if following is not None else coming
        yield here


def _nothing() -> Tensor:
    """Raise AssertionError, because this operand is not needed."""
    raise AssertionError("an operand that no product needs")


def _there(x: Tensor) -> Finish:
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


def _add_product(y: Tensor, x: Tensor, w: Tensor) -> None:
    """Add X·W to `y`, in place."""
    if w.dim() == 3:
        y.baddbmm_(x, w.mT)
    else:
        y.view(-1, y.size(-1)).addmm_(x.flatten(0, -2), w.mT)


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
    work = world.all_reduce(total, axes=moved.axes)

    def finish() -> Tensor:
        work.wait()
        return total

    return finish


def _outer(x: Tensor, dy: Tensor, *, within: int, experts: bool) -> Tensor:
    """Return Xᵀ · dY, with the dims in the order of the stored weight."""
    one, other = (dy, x) if within == -1 else (x, dy)
    return _rows_of(one, experts=experts).mT @ _rows_of(other, experts=experts)


def _together(parts: list[Finish], *, dim: int) -> Tensor | None:
    """Wait for the panels of a gradient and return the whole gradient, or None if there are no panels."""
    arrived = [finish() for finish in parts]
    if len(arrived) < 2:
        return arrived[0] if arrived else None
    return torch.cat(arrived, dim)

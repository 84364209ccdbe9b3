"""One sharded matmul, which every scheme is a use of.

    Y = X · W        gather X, gather W, multiply, reduce Y

        dY ── gather what Y scattered ─┬─ dX = dY · Wᵀ ── reduce what X gathered      starts first: under way
                                       └─ dW = Xᵀ · dY ── reduce what W gathered      while dW is computed

Operands may stream by panels of the inner dim K (SUMMA): the panels of X and W that belong together are gathered while
the ones before are multiplied, so that no rank ever holds a whole gathered operand. Layouts say where operands lie and
not in which order they stream, so this is one argument, and the result is the same.

        X  ┌──┬──┬──┐     W ├────┤ panel 0          Y += X[:, panel] · W[panel, :]        gather panel p+1
           │ 0│ 1│ 2│       ├────┤ panel 1
           └──┴──┴──┘       ├────┤ panel 2
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meshwise.comm import gradient
from meshwise.comm.world import World
from meshwise.layout.geometry import even_split

Finish: TypeAlias = Callable[[], Tensor]
Panel: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Streaming:
    """How operands come together.

    keep     what was gathered in the forward stays for the backward: no gather there, and the memory of whole operands
    panels   into how many panels of K the operands are cut
    """

    keep: bool = False
    panels: int = 1

    def __post_init__(self) -> None:
        if self.panels < 1:
            raise ValueError(f"panels={self.panels}; operands come together in at least one panel")


@dataclass(frozen=True)
class Moved:
    """A collective on one operand: over `axes` (none: not at all), of parts along `dim`.

    dim None: the operand is the same on all ranks, and its counterpart in the other direction is their sum. `sizes`:
    of the parts, in group order; None when they are alike.
    """

    axes: tuple[str, ...] = ()
    dim: int | None = None
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Operation:
    """The collectives of one product on this rank.

    `features`: K, as it is multiplied. `within`: the dim of the stored weight that is K: 1 as torch stores it, (out,
    in), or 0.
    """

    world: World
    x: Moved
    w: Moved
    y: Moved
    features: int
    within: int = 1
    streaming: Streaming = dataclasses.field(default_factory=Streaming)

    @property
    def panels(self) -> list[Panel]:
        """The (start, stop) of every panel of K."""
        return even_split(self.features, max(1, min(self.streaming.panels, self.features)))

    def x_panel(self, panel: Panel) -> _Slice:
        """What this rank has of a panel of X."""
        return _Slice.along(self.world, self.x, panel, dim=-1)

    def w_panel(self, panel: Panel) -> _Slice:
        """What this rank has of a panel of W."""
        return _Slice.along(self.world, self.w, panel, dim=self.within)

    @property
    def adds_bias(self) -> bool:
        """Whether this rank's Y has the bias in it: one summand of a sum has."""
        return not self.y.axes or self.world.group(self.y.axes).index == 0


@dataclass(frozen=True)
class _Slice:
    """A part of what this rank stores of an operand, along K, and how it meets those of the other ranks."""

    start: int
    size: int
    moved: Moved

    @classmethod
    def along(cls, world: World, moved: Moved, panel: Panel, *, dim: int) -> _Slice:
        """Of a panel along `dim` of an operand that is gathered as `moved` says, maybe along that dim."""
        start, stop = panel
        if not moved.axes or moved.dim != dim:
            return cls(start, stop - start, moved)
        assert moved.sizes is not None
        bounds = itertools.pairwise([0, *itertools.accumulate(moved.sizes)])
        shares = [(max(low, start), max(low, start, min(high, stop)), low) for low, high in bounds]
        low, high, first = shares[world.group(moved.axes).index]
        sizes = tuple(end - begin for begin, end, _ in shares)
        return cls(low - first if high > low else 0, high - low, Moved(moved.axes, moved.dim, sizes))

    def of(self, stored: Tensor, *, dim: int) -> Tensor:
        """Cut it out."""
        return stored if self.size == stored.size(dim) else stored.narrow(dim, self.start, self.size)


def matmul(x: Tensor, *, weight: Tensor, bias: Tensor | None = None, operation: Operation) -> Tensor:
    """X·W plus the bias, this rank's part of it: (…, its K) and its part of (out, in) to (…, its out).

    The gradients are those of what this rank stores; that of the bias is the sum over its own rows of Y. Under
    autocast, operands are converted before they travel. Raises ValueError for parts that do not fit `operation`.
    """
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    result: Tensor = _Multiply.apply(x, weight, bias, operation)
    return result


class _Multiply(torch.autograd.Function):
    """The picture at the top of the file."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operation: Operation) -> Tensor:
        added = bias if operation.adds_bias else None
        y: Tensor | None = None
        kept: list[Tensor] = []
        for x_part, w_part in _operands(x, weight, operation):
            if y is None:
                y = functional.linear(x_part, w_part, added)
            else:
                y.view(-1, y.size(-1)).addmm_(x_part.flatten(0, -2), w_part.t())
            kept += [x_part, w_part] if operation.streaming.keep else []
        assert y is not None
        ctx.operation = operation
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight, *kept)
        return _reduce(y, operation.y, world=operation.world)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        operation: Operation = ctx.operation
        x, weight, *kept = ctx.saved_tensors
        for_x, for_w, for_bias, _ = ctx.needs_input_grad
        arriving = _gather(dy, operation.y, world=operation.world)
        operands = zip(kept[::2], kept[1::2], strict=True) if kept else _operands(x, weight, operation)
        d_bias = dy.flatten(0, -2).sum(0) if for_bias else None
        dy = arriving()
        dxs: list[Finish] = []
        dws: list[Finish] = []
        for panel, (x_part, w_part) in zip(operation.panels, operands, strict=True):
            if for_x:
                dxs.append(_reduce(dy @ w_part, operation.x_panel(panel).moved, world=operation.world))
            if for_w:
                dw = _outer(x_part, dy, within=operation.within)
                dws.append(_reduce(dw, operation.w_panel(panel).moved, world=operation.world))
        return _together(dxs, dim=-1), _together(dws, dim=operation.within), d_bias, None


def _operands(x: Tensor, weight: Tensor, operation: Operation) -> Iterator[tuple[Tensor, Tensor]]:
    """X and W, (out, in), panel by panel; the next panel is on its way while one is used."""

    def start(panel: Panel) -> tuple[Finish, Finish]:
        x_panel, w_panel = operation.x_panel(panel), operation.w_panel(panel)
        return (
            _gather(x_panel.of(x, dim=-1), x_panel.moved, world=operation.world),
            _gather(w_panel.of(weight, dim=operation.within), w_panel.moved, world=operation.world),
        )

    panels = operation.panels
    coming = start(panels[0])
    for following in [*panels[1:], None]:
        x_part, w_part = (arrive() for arrive in coming)
        if following is not None:
            coming = start(following)
        yield x_part, w_part if operation.within == 1 else w_part.t()


def _gather(part: Tensor, moved: Moved, *, world: World) -> Finish:
    """Start to bring the parts of an operand together."""
    if not moved.axes or moved.dim is None:
        return lambda: part
    return gradient.all_gather(part, world=world, axes=moved.axes, dim=moved.dim, sizes=moved.sizes).wait


def _reduce(summand: Tensor, moved: Moved, *, world: World) -> Finish:
    """Start to add up a tensor that nobody else uses; a rank gets the part that it would give to a gather."""
    if not moved.axes:
        return lambda: summand
    if moved.dim is not None:
        return gradient.reduce_scatter(summand, world=world, axes=moved.axes, dim=moved.dim, sizes=moved.sizes).wait
    total = summand.contiguous()
    work = world.all_reduce(total, axes=moved.axes)

    def finish() -> Tensor:
        work.wait()
        return total

    return finish


def _outer(x: Tensor, dy: Tensor, *, within: int) -> Tensor:
    """Xᵀ · dY, as the weight is stored."""
    one, other = (dy, x) if within == 1 else (x, dy)
    return one.flatten(0, -2).t() @ other.flatten(0, -2)


def _together(parts: list[Finish], *, dim: int) -> Tensor | None:
    """The gradient that arrived in panels; None of none."""
    arrived = [finish() for finish in parts]
    if len(arrived) < 2:
        return arrived[0] if arrived else None
    return torch.cat(arrived, dim)

"""Collectives that autograd can pass, each with its conjugate.

c10d's collectives end the autograd graph, and their gradient depends on what the ranks do next. The sum of a tensor
that all ranks use in the same way has another gradient than a sum that each rank uses differently. Here a tensor is one
of four kinds, and each collective takes one kind and gives another:

    | split        every rank has its part along a dim
    | partial      every rank has one term of a sum
    | replicated   every rank has all of it and computes the same from it: its gradient is replicated too
    | whole        every rank has all of it and computes something else from it: its gradient is partial

    | collective       from         to           backward
    | all_gather       split        whole        reduce_scatter
    | reduce_scatter   partial      split        all_gather
    | all_reduce       partial      replicated   nothing to do
    | copy             replicated   whole        all_reduce
    | replicate        split        replicated   take
    | take             replicated   split        replicate
    | all_to_all       split        split        all_to_all

A call starts the collective; `.wait()` returns the tensor. The program computes between the two while the collective
runs. Its backward runs during the conjugate, because autograd goes back through the same order.
"""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from meshwise.base.mesh import even_split
from meshwise.comm.api.world import Axes, Work, World

Finish: TypeAlias = Callable[[], Tensor]
Sizes: TypeAlias = Sequence[int] | None


class PendingResult:
    """The result of a collective under way."""

    def __init__(self, passage: "_Passage", *, token: Tensor) -> None:
        self._passage = passage
        self._token = token
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the result, when it is there; the same tensor every time."""
        if self._result is None:
            self._result = _Arrive.apply(self._token, self._passage)
        return self._result


def all_gather(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Gather the parts of all ranks along `axes`, one after the other along `dim`.

    (…, sizes[i], …) → (…, sum(sizes), …).

    `sizes`: of each rank's part along `dim`, in group order; as large as `x` by default. Backward: reduce_scatter.
    Raises ValueError when `sizes` does not describe `x`.
    """
    return _start(x, _Gather(_Along.of_part(x, world, axes, dim=dim, sizes=sizes), replicated=False))


def replicate(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Gather like `all_gather`, for a result that every rank uses in the same way. Backward: take."""
    return _start(x, _Gather(_Along.of_part(x, world, axes, dim=dim, sizes=sizes), replicated=True))


def reduce_scatter(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Return this rank's part along `dim` of the sum of all ranks' `x`: (…, sum(sizes), …) → (…, sizes[i], …).

    `sizes`: of each rank's part, in group order; even by default, the first ones larger by one when it does not
    divide. Backward: all_gather. Raises ValueError when `sizes` does not describe `x`.
    """
    return _start(x, _ReduceScatter(_Along.of(x, world, axes, dim=dim, sizes=sizes)))


def take(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Return this rank's part along `dim` of an `x` that is the same on all ranks; `sizes` as in `reduce_scatter`.

    Backward: replicate. Raises ValueError when `sizes` does not describe `x`.
    """
    return _start(x, _Take(_Along.of(x, world, axes, dim=dim, sizes=sizes)))


def all_reduce(x: Tensor, *, world: World, axes: Axes) -> PendingResult:
    """Return the sum of all ranks' `x`, of the same shape. Backward: the gradient as it is."""
    return _start(x, _AllReduce(world, axes))


def copy(x: Tensor, *, world: World, axes: Axes) -> PendingResult:
    """Return `x`, which is the same on all ranks, for each rank to use differently. Backward: all_reduce."""
    return _start(x, _Copy(world, axes))


def all_to_all(
    x: Tensor,
    *,
    world: World,
    axes: Axes,
    split_dim: int,
    cat_dim: int,
    sizes: tuple[Sequence[int], Sequence[int]] | None = None,
) -> PendingResult:
    """Cut `x` along `split_dim`, give each rank its part, and put what arrives together along `cat_dim`.

    `sizes`: the sizes of the parts cut along `split_dim` and of the received parts along `cat_dim`, in group order. By
    default an even cut, and arriving parts that are as large along `cat_dim` as this rank's own. (…, sum(split), …,
    cat[i], …) → (…, split[i], …, sum(cat), …) for two different dims; with one dim for both, (…, sum(split), …) → (…,
    sum(cat), …).

    Backward: all_to_all with the two exchanged. Raises ValueError when `sizes` does not describe `x`.
    """
    group = world.group(axes)
    cut, arriving = (None, None) if sizes is None else sizes
    split = _Along.of(x, world, axes, dim=split_dim, sizes=cut)
    own = x.size(cat_dim) if cat_dim % x.dim() != split.dim else split.sizes[group.index]
    cat = _Along(world, axes, cat_dim % x.dim(), (own,) * group.size if arriving is None else tuple(arriving))
    if len(cat.sizes) != group.size or (split.dim == cat.dim and cat.sizes[group.index] != split.sizes[group.index]):
        raise ValueError(f"sizes {cat.sizes} along dim {cat_dim} do not fit {split.sizes} along dim {split_dim}")
    return _start(x, _AllToAll(split, cat))


@dataclass(frozen=True)
class CollectiveSource:
    """State of a collective's output, in the words of the table above: the axes over which it is split, partial,
    replicated or whole.
    """

    whole: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    split: tuple[str, ...] = ()


def source_of_output(node: Node) -> CollectiveSource | None:
    """Return the collective that produced an autograd node's output, or None."""
    passage = getattr(node, "passage", None)
    if not isinstance(passage, _Passage):
        return None
    collective = passage.collective
    if isinstance(collective, _Copy):
        return CollectiveSource(whole=_named(collective.axes))
    if isinstance(collective, _AllReduce):
        return CollectiveSource(replicated=_named(collective.axes))
    if isinstance(collective, _Gather):
        axes = _named(collective.along.axes)
        return CollectiveSource(replicated=axes) if collective.replicated else CollectiveSource(whole=axes)
    assert isinstance(collective, _ReduceScatter | _Take | _AllToAll)
    return CollectiveSource(
        split=_named((collective.split if isinstance(collective, _AllToAll) else collective.along).axes)
    )


def _named(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


# ---- the maps ------------------------------------------------------------------------------------------------------


class _Map(abc.ABC):
    """A linear map over the tensors of a group of ranks."""

    @abc.abstractmethod
    def start(self, x: Tensor) -> Finish:
        """Begin; the returned function completes it and gives this rank's result."""

    @abc.abstractmethod
    def conjugate(self) -> "_Map":
        """Return the map of the gradients, the other way."""


@dataclass(frozen=True)
class _Gather(_Map):
    along: "_Along"
    replicated: bool

    def start(self, x: Tensor) -> Finish:
        along, dim = self.along, self.along.dim
        if dim == 0:
            whole = x.new_empty(_resized(x, 0, sum(along.sizes)))
            parts = list(whole.split(along.sizes))
        else:
            parts = [x.new_empty(_resized(x, dim, size)) for size in along.sizes]
        work = along.world.all_gather(x.contiguous(), into=parts, axes=along.axes)

        def finish() -> Tensor:
            work.wait()
            return whole if dim == 0 else torch.cat(parts, dim)

        return finish

    def conjugate(self) -> _Map:
        return _Take(self.along) if self.replicated else _ReduceScatter(self.along)


@dataclass(frozen=True)
class _ReduceScatter(_Map):
    along: "_Along"

    def start(self, x: Tensor) -> Finish:
        along = self.along
        cut = x.split(along.sizes, along.dim)
        parts = [part if part.is_contiguous() else _copied(part, along.world) for part in cut]
        into = x.new_empty(parts[along.index].shape)
        work = along.world.reduce_scatter(parts, into=into, axes=along.axes)
        return _after(work, into)

    def conjugate(self) -> _Map:
        return _Gather(self.along, replicated=False)


@dataclass(frozen=True)
class _Take(_Map):
    along: "_Along"

    def start(self, x: Tensor) -> Finish:
        part = x.split(self.along.sizes, self.along.dim)[self.along.index].clone()
        return lambda: part

    def conjugate(self) -> _Map:
        return _Gather(self.along, replicated=True)


@dataclass(frozen=True)
class _AllReduce(_Map):
    world: World
    axes: Axes

    def start(self, x: Tensor) -> Finish:
        total = _copied(x, self.world)
        # As a tensor of its own: autograd lets nobody write to a view that one of its functions returns.
        return _after(self.world.all_reduce(total, axes=self.axes), total.data)

    def conjugate(self) -> _Map:
        return _Copy(self.world, self.axes)


@dataclass(frozen=True)
class _Copy(_Map):
    world: World
    axes: Axes

    def start(self, x: Tensor) -> Finish:
        return x.detach

    def conjugate(self) -> _Map:
        return _AllReduce(self.world, self.axes)


@dataclass(frozen=True)
class _AllToAll(_Map):
    split: "_Along"
    cat: "_Along"

    def start(self, x: Tensor) -> Finish:
        split, cat = self.split, self.cat
        parts = [part.contiguous() for part in x.split(split.sizes, split.dim)]
        mine = _resized(x, split.dim, split.sizes[split.index])
        into = [x.new_empty(_resized(mine, cat.dim, size)) for size in cat.sizes]
        work = split.world.all_to_all(parts, into=into, axes=split.axes)

        def finish() -> Tensor:
            work.wait()
            return torch.cat(into, cat.dim)

        return finish

    def conjugate(self) -> _Map:
        return _AllToAll(self.cat, self.split)


@dataclass(frozen=True)
class _Along:
    """A dim of a tensor that is or will be cut into parts, one for each rank along some axes."""

    world: World
    axes: Axes
    dim: int
    sizes: tuple[int, ...]

    @property
    def index(self) -> int:
        return self.world.group(self.axes).index

    @classmethod
    def of(cls, x: Tensor, world: World, axes: Axes, *, dim: int, sizes: Sizes) -> "_Along":
        """Return the cut of a whole `x`, even unless `sizes` is given."""
        size, ranks = x.size(dim), world.group(axes).size
        even = [stop - start for start, stop in even_split(size, ranks)]
        along = cls(world, axes, dim % x.dim(), tuple(even if sizes is None else sizes))
        if len(along.sizes) != ranks or sum(along.sizes) != size:
            raise ValueError(f"sizes {along.sizes} do not cut dim {dim} of {tuple(x.shape)} into {ranks} parts")
        return along

    @classmethod
    def of_part(cls, x: Tensor, world: World, axes: Axes, *, dim: int, sizes: Sizes) -> "_Along":
        """Return the cut that gives this rank `x`; all parts are equal unless `sizes` is given."""
        size, group = x.size(dim), world.group(axes)
        along = cls(world, axes, dim % x.dim(), (size,) * group.size if sizes is None else tuple(sizes))
        if len(along.sizes) != group.size or along.sizes[group.index] != size:
            raise ValueError(
                f"sizes {along.sizes} do not fit part {group.index} of {group.size}, which has {size} "
                f"along dim {dim} of {tuple(x.shape)}"
            )
        return along


def _resized(x: Tensor | Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    shape = list(x.shape if isinstance(x, Tensor) else x)
    shape[dim] = size
    return tuple(shape)


def _copied(x: Tensor, world: World) -> Tensor:
    """Return a contiguous copy, where the other ranks reach it soonest."""
    if x.device != world.device:
        return x.clone(memory_format=torch.contiguous_format)
    return world.empty_for_reduce(x.shape, dtype=x.dtype).copy_(x)


def _after(work: Work, result: Tensor) -> Finish:
    def finish() -> Tensor:
        work.wait()
        return result

    return finish


# ---- through autograd ----------------------------------------------------------------------------------------------


class _Passage:
    """State shared by the forward and backward of one collective."""

    def __init__(self, collective: _Map) -> None:
        self.collective = collective
        self.finish: Finish | None = None

    def arrive(self) -> Tensor:
        assert self.finish is not None
        finish, self.finish = self.finish, None
        return finish()


class _Depart(torch.autograd.Function):
    """x → a token without elements, which ties the two ends together in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        passage.finish = passage.collective.start(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor, None]:
        return ctx.passage.arrive(), None


class _Arrive(torch.autograd.Function):
    """token → the result."""

    @staticmethod
    def forward(ctx: Any, _token: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        return passage.arrive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.passage.finish = ctx.passage.collective.conjugate().start(gradient)
        return gradient.new_empty(0), None


def _start(x: Tensor, collective: _Map) -> PendingResult:
    passage = _Passage(collective)
    return PendingResult(passage, token=_Depart.apply(x, passage))

"""Collectives with a backward: in the backward of a collective its conjugate collective runs on the gradient.

c10d's collectives have no backward. The right gradient of a sum depends on its later use: all ranks may compute the
same from it, or each rank something different. So a tensor here is of one of four kinds, and each collective takes
a tensor of one kind and returns a tensor of another kind:

    | split        every rank has its part along a dim
    | partial      every rank has one term of a sum
    | replicated   every rank has the full tensor and computes the same from it: the gradient is replicated too
    | whole        every rank has the full tensor and computes something different from it: the gradient is partial

    | collective       from         to           backward
    | all_gather       split        whole        reduce_scatter
    | reduce_scatter   partial      split        all_gather
    | all_reduce       partial      replicated   nothing to do
    | copy             replicated   whole        all_reduce
    | replicate        split        replicated   take
    | take             replicated   split        replicate
    | all_to_all       split        split        all_to_all

A call starts the collective, and `.wait()` returns the resulting tensor. Computation between the call and `.wait()`
overlaps with the collective. The backward of this computation overlaps with the conjugate collective, because autograd
runs the backward of `.wait()` first and the backward of the call last."""

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
"""Function that waits for a collective in progress and returns this rank's result."""

Sizes: TypeAlias = Sequence[int] | None
"""Size of each rank's part along a dim, in group order. None stands for the default of the collective."""


class PendingResult:
    """Result of a collective in progress; `wait` returns the tensor."""

    def __init__(self, passage: "_Passage", *, token: Tensor) -> None:
        self._passage = passage
        self._token = token
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Block until the collective is complete, and return its result: the same tensor at every call."""
        if self._result is None:
            self._result = _Arrive.apply(self._token, self._passage)
        return self._result


def all_gather(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Concatenate the parts of all ranks along `axes` in dim `dim`: (…, sizes[i], …) → (…, sum(sizes), …). `sizes`:
    size of each rank's part along `dim`, in group order; by default every part is as large as `x`. Backward:
    reduce_scatter. Raises ValueError when `sizes` does not fit `x` and the group."""
    return _start(x, _Gather(_Along.of_part(x, world, axes, dim=dim, sizes=sizes), replicated=False))


def replicate(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Concatenate like `all_gather`, for a result from which every rank computes the same. Backward: take."""
    return _start(x, _Gather(_Along.of_part(x, world, axes, dim=dim, sizes=sizes), replicated=True))


def reduce_scatter(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Return this rank's part along `dim` of the sum of all ranks' `x`: (…, sum(sizes), …) → (…, sizes[i], …). `sizes`:
    size of each rank's part, in group order. By default parts are equal, or the first parts are larger by one.
    Backward: all_gather. Raises ValueError when `sizes` does not fit `x` and the group."""
    return _start(x, _ReduceScatter(_Along.of(x, world, axes, dim=dim, sizes=sizes)))


def take(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Return a copy of this rank's part along `dim` of an `x` that is equal on all ranks, without communication.
    `sizes`: as in `reduce_scatter`. Backward: replicate. Raises ValueError when `sizes` does not fit `x` and the group.
    """
    return _start(x, _Take(_Along.of(x, world, axes, dim=dim, sizes=sizes)))


def all_reduce(x: Tensor, *, world: World, axes: Axes) -> PendingResult:
    """Return the sum of all ranks' `x`, in the shape of `x`. Backward: pass the gradient on unchanged."""
    return _start(x, _AllReduce(world, axes))


def copy(x: Tensor, *, world: World, axes: Axes) -> PendingResult:
    """Return `x`, equal on all ranks, from which each rank computes something different. Backward: all_reduce."""
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
    """Cut `x` along `split_dim`, send each rank its part, and concatenate the received parts along `cat_dim`.

    `sizes`: sizes of the sent parts along `split_dim` and of the received parts along `cat_dim`, each in group order.
    By default `x` is cut evenly, and every received part is as large along `cat_dim` as this rank's own part.

        | two dims         (…, sum(split), …, cat[i], …) → (…, split[i], …, sum(cat), …)
        | one dim for both (…, sum(split), …) → (…, sum(cat), …)

    Backward: all_to_all with the two dims exchanged. Raises ValueError when `sizes` does not fit `x` and the group."""
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
    """Kind of a collective's output (see the first table of this file), and the axes of the collective. The field of
    that kind holds the axes; the other two are empty. No collective has a partial output."""

    whole: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    split: tuple[str, ...] = ()


def source_of_output(node: Node) -> CollectiveSource | None:
    """Return the axes over which a node's output is whole, replicated or split; None if another code made the node."""
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
        """Start the map of `x`; the returned function waits for this rank's result and returns it."""

    @abc.abstractmethod
    def conjugate(self) -> "_Map":
        """Return the map from the gradient of the output to the gradient of the input."""


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
        return _after(work, lambda: whole if dim == 0 else torch.cat(parts, dim))

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
        return _after(work, lambda: into)

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
        # `.data` is no view to autograd, which forbids writing to a view that one of its functions returned.
        return _after(self.world.all_reduce(total, axes=self.axes), lambda: total.data)

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
        return _after(work, lambda: torch.cat(into, cat.dim))

    def conjugate(self) -> _Map:
        return _AllToAll(self.cat, self.split)


@dataclass(frozen=True)
class _Along:
    """A dim of a tensor with the sizes of its parts, one part for each rank along `axes`."""

    world: World
    axes: Axes
    dim: int
    sizes: tuple[int, ...]

    @property
    def index(self) -> int:
        return self.world.group(self.axes).index

    @classmethod
    def of(cls, x: Tensor, world: World, axes: Axes, *, dim: int, sizes: Sizes) -> "_Along":
        """Return the parts of a full `x` along `dim`, of the given `sizes`. None: equal, or the first ones 1 larger."""
        size, ranks = x.size(dim), world.group(axes).size
        even = [stop - start for start, stop in even_split(size, ranks)]
        along = cls(world, axes, dim % x.dim(), tuple(even if sizes is None else sizes))
        if len(along.sizes) != ranks or sum(along.sizes) != size:
            raise ValueError(f"sizes {along.sizes} do not cut dim {dim} of {tuple(x.shape)} into {ranks} parts")
        return along

    @classmethod
    def of_part(cls, x: Tensor, world: World, axes: Axes, *, dim: int, sizes: Sizes) -> "_Along":
        """Return the parts along `dim` if `x` is this rank's part. Without `sizes`, all parts are as large as `x`."""
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
    """Return a contiguous copy; on the world's device, in memory that other ranks read fast."""
    if x.device != world.device:
        return x.clone(memory_format=torch.contiguous_format)
    return world.empty_for_reduce(x.shape, dtype=x.dtype).copy_(x)


def _after(work: Work, result: Finish) -> Finish:
    """Return a function that waits for `work` and returns `result()`."""

    def finish() -> Tensor:
        work.wait()
        return result()

    return finish


# ---- through autograd ----------------------------------------------------------------------------------------------


class _Passage:
    """State shared by the two autograd functions of one collective, in its forward and its backward."""

    def __init__(self, collective: _Map) -> None:
        self.collective = collective
        self.finish: Finish | None = None

    def arrive(self) -> Tensor:
        assert self.finish is not None
        finish, self.finish = self.finish, None
        return finish()


class _Depart(torch.autograd.Function):
    """Start the collective on `x`, and return an empty tensor that connects this function with `_Arrive` in the graph.
    The backward waits for the conjugate collective and returns its result."""

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
    """Wait for the result of the collective. The backward starts the conjugate collective on the gradient."""

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

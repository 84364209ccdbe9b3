"""Collectives with a backward: in the backward of a collective its conjugate collective runs on the gradient.

c10d's collectives have no backward. The right gradient of a sum over ranks depends on the use of the sum: all ranks may
compute the same from it, or each rank something different. So a tensor here is of one of four kinds (DTensor has the
first three), and each collective turns one kind into another, or into itself:

    | split        every rank has its part along a dim (`Shard`)
    | partial      every rank has one term of a sum (`Partial`)
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

A call starts the collective along `axes` of `world`, and `.wait()` returns the result. Computation between the call and
`.wait()` overlaps with the collective. The backward of this computation overlaps with the conjugate collective:
autograd runs the backward of `.wait()` first and the backward of the call last.

In a compiled block a collective is one operator of its graph, `meshwise::collective`. `.wait()` then does nothing."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from meshwise.base.mesh import even_split
from meshwise.comm.api.world import WORLDS, Axes, Work, World

Finish: TypeAlias = Callable[[], Tensor]
"""Function that waits for a collective in progress and returns this rank's result."""

Sizes: TypeAlias = Sequence[int] | None
"""Size of each rank's part along a dim, in group order. None stands for the default of the collective."""


F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Exclude `function`, and all that it calls, from torch.compile: a compiled block has graph breaks there.

    `torch.compiler.disable` does the same, but imports the compiler: that doubles the import time of this package."""
    return _disable_dynamo(function)  # type: ignore[return-value]


class PendingResult:
    """Result of a collective in progress; `wait` returns the tensor."""

    def __init__(self, passage: "_Passage | None" = None, *, token: Tensor | None = None, result: Tensor | None = None):
        self._passage = passage
        self._token = token
        self._result = result

    def wait(self) -> Tensor:
        """Block until the collective is complete, and return its result: the same tensor at every call."""
        if self._result is None:
            self._result = self._arrive()
        return self._result

    @uncompiled
    def _arrive(self) -> Tensor:
        result: Tensor = _Arrive.apply(self._token, self._passage)
        return result


def all_gather(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Concatenate the parts of all ranks along `axes` in dim `dim`: (…, sizes[i], …) → (…, sum(sizes), …). `sizes`:
    size of each rank's part along `dim`, in group order; by default every part is as large as `x`. Backward:
    reduce_scatter. Raises ValueError when `sizes` does not fit `x` and the group."""
    return _start("all_gather", x, _Along.of_part(x, world, axes, dim=dim, sizes=sizes))


def replicate(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Concatenate as `all_gather` does, for use in computations that are the same on every rank. Backward: take."""
    return _start("replicate", x, _Along.of_part(x, world, axes, dim=dim, sizes=sizes))


def reduce_scatter(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Return this rank's part along `dim` of the sum of all ranks' `x`: (…, sum(sizes), …) → (…, sizes[i], …). `sizes`:
    size of each rank's part, in group order. By default parts are equal, or the first parts are larger by one.
    Backward: all_gather. Raises ValueError when `sizes` does not fit `x` and the group."""
    return _start("reduce_scatter", x, _Along.of(x, world, axes, dim=dim, sizes=sizes))


def take(x: Tensor, *, world: World, axes: Axes, dim: int = 0, sizes: Sizes = None) -> PendingResult:
    """Return a copy of this rank's part along `dim` of an `x` that is equal on all ranks, without communication.
    `sizes`: as in `reduce_scatter`. Backward: replicate. Raises ValueError if `sizes` does not fit `x` or the ranks."""
    return _start("take", x, _Along.of(x, world, axes, dim=dim, sizes=sizes))


def all_reduce(x: Tensor, *, world: World, axes: Axes) -> PendingResult:
    """Return the sum of all ranks' `x`, in the shape of `x`. Backward: pass the gradient on unchanged."""
    return _start("all_reduce", x, _Along(world, axes))


def copy(x: Tensor, *, world: World, axes: Axes) -> PendingResult:
    """Return `x`, equal on all ranks, for use in computations that differ between ranks. Backward: all_reduce."""
    return _start("copy", x, _Along(world, axes))


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
    return _start("all_to_all", x, split, cat)


def source_of_output(node: Node) -> tuple[str, tuple[str, ...]] | None:
    """Return the kind of an autograd node's output (see the first table of this file), and the axes of the collective.
    Return None for a node that no collective of this file made. No collective has a partial output."""
    passage = getattr(node, "passage", None)
    if not isinstance(passage, _Passage):
        return None
    axes = passage.along.axes
    return _COLLECTIVES[passage.name].output, (axes,) if isinstance(axes, str) else tuple(axes)


# ---- the collectives -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Along:
    """A dim of a tensor with the sizes of its parts, one part for each rank along `axes`. `all_reduce` has no dim."""

    world: World
    axes: Axes
    dim: int = 0
    sizes: tuple[int, ...] = ()

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
        if len(along.sizes) != group.size or group.own(along.sizes) != size:
            raise ValueError(
                f"sizes {along.sizes} do not fit part {group.index} of {group.size}, which has {size} "
                f"along dim {dim} of {tuple(x.shape)}"
            )
        return along


def _resized(x: Tensor | Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    shape = list(x.shape if isinstance(x, Tensor) else x)
    shape[dim] = size
    return tuple(shape)


def _memory(x: Tensor, world: World) -> Tensor:
    """Return memory for a contiguous copy of `x`; on the world's device, other ranks read it fast."""
    if x.device != world.device:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return world.empty_for_reduce(x.shape, dtype=x.dtype)


def _parts_in(memory: Tensor, along: _Along) -> list[Tensor]:
    """Return the parts of a contiguous tensor along a dim, as views that lie one after the other in its memory."""
    shapes = [_resized(memory, along.dim, size) for size in along.sizes]
    flat = memory.view(-1).split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


def after(work: Work, *, world: World, result: Finish) -> Finish:
    """Return a function that lets a computation beside this one run, waits for `work`, and returns `result()`."""

    def finish() -> Tensor:
        world.side_by_side.hand_over()
        work.wait()
        return result()

    return finish


def _start_gather(x: Tensor, along: _Along, _: _Along) -> Finish:
    whole = x.new_empty(_resized(x, along.dim, sum(along.sizes)))
    parts = _parts_in(whole, along)
    work = along.world.all_gather(x.contiguous(), into=parts, axes=along.axes)
    return after(work, world=along.world, result=lambda: torch.cat(parts, along.dim) if along.dim else whole)


def _start_reduce_scatter(x: Tensor, along: _Along, _: _Along) -> Finish:
    parts = list(x.split(along.sizes, along.dim))
    if not all(part.is_contiguous() for part in parts):  # parts that are adjacent in memory need only one native call
        parts = [to.copy_(part) for to, part in zip(_parts_in(_memory(x, along.world), along), parts, strict=True)]
    into = x.new_empty(parts[along.index].shape)
    work = along.world.reduce_scatter(parts, into=into, axes=along.axes)
    return after(work, world=along.world, result=lambda: into)


def _start_take(x: Tensor, along: _Along, _: _Along) -> Finish:
    part = x.split(along.sizes, along.dim)[along.index].clone()
    return lambda: part


def _start_all_reduce(x: Tensor, along: _Along, _: _Along) -> Finish:
    total = _memory(x, along.world).copy_(x)
    work = along.world.all_reduce(total, axes=along.axes)
    # `.data` is no view to autograd, which forbids writing to a view that one of its functions returned.
    return after(work, world=along.world, result=lambda: total.data)


def _start_all_to_all(x: Tensor, split: _Along, cat: _Along) -> Finish:
    given = [part.contiguous() for part in x.split(split.sizes, split.dim)]
    whole = x.new_empty(_resized(_resized(x, split.dim, split.sizes[split.index]), cat.dim, sum(cat.sizes)))
    parts = _parts_in(whole, cat)
    work = split.world.all_to_all(given, into=parts, axes=split.axes)
    return after(work, world=split.world, result=lambda: torch.cat(parts, cat.dim) if cat.dim else whole)


class _Collective(NamedTuple):
    """A linear map over the tensors of a group of ranks.

    | start      starts the map of a tensor, given the parts of the tensor and the parts of the result
    | output     kind of the result, see the first table of this file
    | backward   name of the map from the gradient of the result to the gradient of the tensor"""

    start: Callable[[Tensor, _Along, _Along], Finish]
    output: str
    backward: str


_COLLECTIVES: Mapping[str, _Collective] = {
    "all_gather": _Collective(_start_gather, "whole", "reduce_scatter"),
    "reduce_scatter": _Collective(_start_reduce_scatter, "split", "all_gather"),
    "all_reduce": _Collective(_start_all_reduce, "replicated", "copy"),
    "copy": _Collective(lambda x, _, __: x.detach, "whole", "all_reduce"),
    # in a graph: torch.compile would make one of two equal gathers, and keep the result from forward to backward
    "regather": _Collective(_start_gather, "whole", "reduce_scatter"),
    "replicate": _Collective(_start_gather, "replicated", "take"),
    "take": _Collective(_start_take, "split", "replicate"),
    "all_to_all": _Collective(_start_all_to_all, "split", "all_to_all"),
}


# ---- through autograd ----------------------------------------------------------------------------------------------


@dataclass
class _Passage:
    """One collective in its forward and its backward. `along` and `cat`: parts of the tensor and of the result."""

    name: str
    along: _Along
    cat: _Along
    finish: Finish | None = None

    def start(self, x: Tensor) -> None:
        self.finish = _COLLECTIVES[self.name].start(x, self.along, self.cat)

    def start_backward(self, gradient: Tensor) -> None:
        self.finish = _COLLECTIVES[_COLLECTIVES[self.name].backward].start(gradient, self.cat, self.along)

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
        passage.start(x)
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
        ctx.passage.start_backward(gradient)
        return gradient.new_empty(0), None


def _start(name: str, x: Tensor, along: _Along, cat: _Along | None = None) -> PendingResult:
    if torch.compiler.is_dynamo_compiling() and cat is None:
        axes = [along.axes] if isinstance(along.axes, str) else list(along.axes)
        own = along.world.group(axes).own(along.sizes) if along.sizes else 0
        place = axes, along.dim, list(along.sizes), own
        return PendingResult(result=in_graph(x, name=name, world=along.world.ticket, place=place))
    return _start_now(name, x, along, cat or along)


@uncompiled
def _start_now(name: str, x: Tensor, along: _Along, cat: _Along) -> PendingResult:
    passage = _Passage(name, along, cat)
    return PendingResult(passage, token=_Depart.apply(x, passage))


# ---- in the graph of a compiled block ------------------------------------------------------------------------------


def in_graph(x: Tensor, *, name: str, world: Tensor, place: Sequence[Any]) -> Tensor:
    """Return the complete result of the collective `name`. world: ticket of the world.

    place: the axes; if the collective has a dim also the dim, the sizes of all parts along it, and of this rank's."""
    result: Tensor = torch.ops.meshwise.collective(name, x, world, *place)
    return result


torch.library.define(
    "meshwise::collective",
    "(str name, Tensor x, Tensor world, str[] axes, int dim=0, int[] sizes=[], int own=0) -> Tensor",
)


@torch.library.impl("meshwise::collective", "CompositeExplicitAutograd")
def _run(name: str, x: Tensor, world: Tensor, axes: list[str], dim: int = 0, *sizes_and_own: Any) -> Tensor:
    along = _Along(WORLDS[world], tuple(axes), dim, tuple(sizes_and_own[0] if sizes_and_own else ()))
    result = _COLLECTIVES[name].start(x, along, along)().contiguous()
    return result.clone() if result.data_ptr() == x.data_ptr() else result


def _like(
    name: str, x: Tensor, _world: Any, _axes: Any, dim: int = 0, sizes: Sequence[int] = (), own: int = 0
) -> Tensor:
    size = own if _COLLECTIVES[name].output == "split" else sum(sizes)
    return x.new_empty(_resized(x, dim, size) if sizes else x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 (torch names it)
    ctx.name, _, world, *ctx.place = inputs
    ctx.save_for_backward(world)


def _run_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    backward = _COLLECTIVES[ctx.name].backward
    return None, in_graph(gradient, name=backward, world=ctx.saved_tensors[0], place=ctx.place), *[None] * 5


torch.library.register_fake("meshwise::collective", _like)
torch.library.register_autograd("meshwise::collective", _run_backward, setup_context=_save)

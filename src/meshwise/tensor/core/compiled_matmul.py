"""The product of a sharded matrix as one operator in the graph of a compiled block.

torch.compile cannot trace collectives, so in a graph a split linear is the operator `meshwise::matmul`, which runs the
functions of `matmul.py`. Sizes of the ranks' parts are constants of the graph, as shapes are; the rest comes from the
`Projection` that a ticket names. An X that was gathered for several products is gathered again in the backward. The
compiler finds that these gathers are equal, and makes one."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwise.base.tickets import Tickets
from meshwise.comm.api.autograd_collectives import in_graph
from meshwise.tensor.core.matmul import (
    MatmulCollectives,
    MatmulInput,
    OperandMove,
    multiply,
    multiply_backward,
    to_product_dtype,
)


class Product(Protocol):
    """What the operator needs of a `Projection`."""

    def operation(self, sizes: Sequence[Sequence[int]] = ()) -> MatmulCollectives:
        """Return the collectives of the product. sizes: the ranks' sizes of X and of Y; by default the present ones."""


PRODUCTS: Tickets[Product] = Tickets()

# product: ticket of a `Projection`. x_sizes, y_sizes: the ranks' sizes of X and Y; [] if they are equal or not split.
# shape: of Y. stored, world, axes, dim, sizes: of an X that was gathered before, this rank's part and its gather.
# Other arguments need another name: Inductor's cache on disk has code that calls the operators as they were.
_SIZES = "Tensor product, int[] x_sizes, int[] y_sizes"
torch.library.define(
    "meshwise::matmul",
    f"(Tensor x, Tensor weight, Tensor? bias, {_SIZES}, int[] shape, "
    "Tensor? stored, Tensor world, str[] axes, int dim, int[] sizes) -> Tensor",
)
torch.library.define(
    "meshwise::matmul_backward",
    f"(Tensor dy, Tensor x, Tensor weight, {_SIZES}, bool[] needed, int[] x_shape) -> (Tensor, Tensor, Tensor)",
)


def compiled_matmul(
    x: MatmulInput,
    *,
    weight: Tensor,
    bias: Tensor | None,
    operation: MatmulCollectives,
    product: Tensor,
    shape: Sequence[int],
) -> Tensor:
    """Return what `matmul` returns, in the graph that torch.compile traces. product: ticket; shape: of the result."""
    value, weight = to_product_dtype(x.value), to_product_dtype(weight)
    bias = None if bias is None else to_product_dtype(bias)
    stored, again = None, OperandMove()
    if x.gathering is not None and x.stored is not None and x.stored.dtype == value.dtype:
        stored, again = x.stored, x.gathering.moved
    x_sizes, y_sizes = list(operation.x.sizes or ()), list(operation.y.sizes or ())
    own = value, weight, bias, product, x_sizes, y_sizes, list(shape)
    place = list(again.axes), again.dim or 0, list(again.sizes or ())
    result: Tensor = torch.ops.meshwise.matmul(*own, stored, operation.world.ticket, *place)
    return result


@torch.library.impl("meshwise::matmul", "CompositeExplicitAutograd")
def _run(x: Tensor, weight: Tensor, bias: Tensor | None, product: Tensor, *sizes: Any) -> Tensor:
    operation = PRODUCTS[product].operation(sizes[:2])
    y, _ = multiply(x, weight=weight, bias=bias, operation=operation)
    operation.recall.protect(y)  # compiled code may write to it
    return y.contiguous()


def _like(x: Tensor, _weight: Any, _bias: Any, _product: Any, _x: Any, _y: Any, shape: list[int], *_: Any) -> Tensor:
    return x.new_empty(shape)


@torch.library.impl("meshwise::matmul_backward", "CompositeExplicitAutograd")
def _run_backward(dy: Tensor, x: Tensor, weight: Tensor, product: Tensor, *sizes: Any) -> tuple[Tensor, ...]:
    operation = PRODUCTS[product].operation(sizes[:2])
    found = multiply_backward(dy, saved=(x, weight), operation=operation, needed=sizes[2])
    return tuple(dy.new_empty(0) if one is None else one.contiguous() for one in found)


def _like_backward(dy: Tensor, _x: Tensor, weight: Tensor, *sizes: Any) -> tuple[Tensor, ...]:
    *_, needed, x_shape = sizes
    shapes = x_shape, weight.shape, dy.shape[-1:]
    return tuple(dy.new_empty(shape if need else 0) for shape, need in zip(shapes, needed, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 (torch names it)
    x, weight, _, product, *ctx.sizes, _, stored, world, axes, dim, sizes = inputs
    ctx.again, ctx.x_shape = None if stored is None else (axes, dim, sizes), list(x.shape)
    ctx.save_for_backward(x if stored is None else stored, weight, product, world)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight, product, world = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[:3])
    if ctx.again is not None and needed[1]:
        x = in_graph(x, name="regather", world=world, place=ctx.again)
    found = torch.ops.meshwise.matmul_backward(dy, x, weight, product, *ctx.sizes, needed, ctx.x_shape)
    return *(one if need else None for one, need in zip(found, needed, strict=True)), *[None] * 9


torch.library.register_fake("meshwise::matmul", _like)
torch.library.register_fake("meshwise::matmul_backward", _like_backward)
torch.library.register_autograd("meshwise::matmul", _gradients, setup_context=_save)

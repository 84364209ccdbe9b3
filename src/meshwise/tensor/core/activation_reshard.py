"""Reshard activations outside of matmuls, by hooks on modules and by functions that attentions call.

With sequence parallelism the hidden states are split along the tokens from the first repeated block to the last one.
Embeddings, position numbers, rotary tables and masks are made outside of the blocks, for whole sequences.

Under 3D the rows of the batch are split over the axes (i, j) in the hidden states, but over (i, l) inside an attention
or MLP. So an argument of an attention that has a batch dim, such as a mask, is moved to the rows inside. If it needs a
gradient, each rank computes the gradient for its own heads, and the ranks sum these gradients."""

import dataclasses
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.layout.layout import DimSplit, Layout
from meshwise.tensor.core.module_role import Part
from meshwise.tensor.core.split_context import SplitContext
from meshwise.tensor.detect.attention_names import BY_HEAD, MASKS, TABLES
from meshwise.tensor.tp_schemes import Axes

Change: TypeAlias = Callable[[Tensor], Tensor]
"""Function that a hook applies to an input or output of a module."""
HookArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a module, as a hook before its forward returns them."""
_HIDDEN = "hidden_states"
_POSITIONS = ("position_embeddings", "position_ids", "cos", "sin")


def exchange_row_counts(module: nn.Module, *, context: SplitContext) -> None:
    """Register a hook that exchanges the ranks' numbers of rows before each forward, if the scheme moves rows."""
    axes = context.scheme.colwise.x.axes
    if context.scheme.colwise.x.dim != "rows" or context.degree(axes) == 1:
        return

    def before(_module: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        rows = next(tensor.size(0) for tensor in tensors((args, dict(given))) if tensor.dim())
        context.shard_sizes.rows = tuple(context.world.exchange(rows, axes=axes))

    module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)


def gather_input_once(module: nn.Module, *, context: SplitContext, features: int, readers: int) -> None:
    """Register a hook that gathers hidden states of `features` features once, at the entry, for `readers` linears."""
    move = context.scheme.colwise.x
    sizes = context.sizes(features, axes=move.axes)

    def gather(x: Tensor) -> Tensor:
        return context.gather_shared(x, moved=context.operand_move(move, features=sizes), readers=readers).value

    if context.degree(move.axes) > 1:
        change_input(module, change=gather)


def require_even_rows(module: nn.Module, *, name: str, context: SplitContext) -> None:
    """Register a hook on a module that reads its number of rows: it raises ValueError if the ranks' numbers differ."""

    def before(_module: nn.Module, _args: Any) -> None:
        rows = context.shard_sizes.rows
        if rows is not None and len(set(rows)) > 1:
            raise ValueError(
                f"{name} takes the number of rows from its input, but under tp_mode=3d its matrices return other "
                f"ranks' rows, and the ranks have different numbers: {rows}. Use batches (and microbatches) that "
                "divide evenly, or another tp_mode"
            )

    module.register_forward_pre_hook(before)


def narrow_input(module: nn.Module, *, readers: Sequence[nn.Module], features: int) -> None:
    """Register hooks: `module` gets the first `features` features of its input, and its `readers` get all of them."""
    whole: list[Tensor] = []

    def narrow(x: Tensor) -> Tensor:
        whole[:] = [x]
        return x[..., :features]

    def read(_reader: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (whole[0], *args[1:])

    def forget(_module: nn.Module, _args: Any, _output: Any) -> None:
        whole.clear()

    change_input(module, change=narrow)
    for reader in readers:
        reader.register_forward_pre_hook(read)
    module.register_forward_hook(forget, always_call=True)


def share_input_channels(convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d, *, context: SplitContext, axes: Axes) -> None:
    """Register a hook that gathers split channels of the input. The gradient is always summed over `axes`."""
    channels, dim = convolution.in_channels, -1 - len(convolution.kernel_size)
    sizes = context.sizes(channels, axes=axes)

    def share(x: Tensor) -> Tensor:
        if x.size(dim) != channels:
            return gradient.all_gather(x, world=context.world, axes=axes, dim=dim, sizes=sizes).wait()
        return with_summed_gradient(x, context=context, axes=axes)

    change_input(convolution, change=share)


def sum_gradient_of_features(module: nn.Module, *, context: SplitContext, start: int) -> None:
    """Register a hook that sums the gradient of the output's features from `start` on over the ranks of the heads."""

    def summed(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        rest = with_summed_gradient(output[..., start:], context=context, axes=context.scheme.inner)
        return torch.cat((output[..., :start], rest), -1)

    if context.degree(context.scheme.inner) > 1:
        module.register_forward_hook(summed)


def with_summed_gradient(x: Tensor, *, context: SplitContext, axes: Axes) -> Tensor:
    """Return `x`; its gradient is summed over `axes`, whose ranks have an equal `x` but other parameters."""
    return gradient.copy(x, world=context.world, axes=axes).wait() if x.requires_grad else x


def to_inner_rows(x: Tensor, *, context: SplitContext) -> Tensor:
    """Move `x` from this rank's rows of the hidden states, in dim 0, to its rows inside a pair.

    `x` is an argument such as a mask, and dim 0 may be (rows · heads). Return `x` itself if its dim 0 is not rows, or
    if the scheme has the same rows inside a pair. This is a collective under 3D only."""
    there, back = context.scheme.colwise.x, context.scheme.colwise.y
    if there.dim != "rows" or context.degree(there.axes) == 1 or not x.dim():
        return x
    world, group = context.world, context.world.group(there.axes)
    rows = context.shard_sizes.rows or (x.size(0),) * group.size
    sizes = (x.size(0),) * group.size
    if min(rows) < max(rows):  # a dim 0 that is not rows may fit by chance, but not on all ranks
        sizes = tuple(world.exchange(x.size(0), axes=there.axes))
    each = max(sizes) // max(1, *rows)
    if not each or sizes != tuple(each * count for count in rows):
        return x
    whole = gradient.all_gather(x, world=world, axes=there.axes, sizes=sizes).wait()
    inner: Tensor = whole.split(sizes)[world.group(back.axes).index]
    return inner


def to_hidden_rows(x: Tensor, *, context: SplitContext) -> Tensor:
    """Move `x` from this rank's rows inside a pair, in dim 0, to its rows of the hidden states.

    `x` is equal on all ranks that have the same rows inside a pair. This is a collective under 3D only."""
    there, back, rows = context.scheme.colwise.x, context.scheme.colwise.y, context.shard_sizes.rows
    if there.dim != "rows" or context.degree(there.axes) == 1:
        return x
    whole = gradient.replicate(x, world=context.world, axes=back.axes, dim=0, sizes=rows).wait()
    return gradient.take(whole, world=context.world, axes=there.axes, dim=0, sizes=rows).wait()


def sum_gradient_over_heads(x: Tensor, *, context: SplitContext) -> Tensor:
    """Return a copy of `x` whose gradient is summed over the ranks that use `x` for their own heads or features.

    Return `x` itself if it needs no gradient, or if an earlier operation sums the gradient (see `TensorOrigins`)."""
    scheme = context.scheme
    axes = tuple(axis for axis in (*scheme.inner, *scheme.inner_rows) if axis not in scheme.rows)
    if not x.requires_grad or context.degree(axes) == 1:
        return x
    summed = context.origins.summed_behind(x, axes=axes)
    axes = tuple(axis for axis in axes if axis not in summed)
    return gradient.copy(x, world=context.world, axes=axes).wait() if context.degree(axes) > 1 else x


def align_arguments(module: nn.Module, *, context: SplitContext, widths: Collection[int]) -> None:
    """Register hooks that move a module's arguments to the rows inside its pair, and sum the arguments' gradients.

    Arguments that colwise matrices read stay unchanged, because the matrices reshard them. Such an argument has one of
    `widths` as number of features, and as many dims as the hidden states (or it is one of TABLES)."""
    dims = [0]

    def look(_module: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        dims[0] = next((x.dim() for x in tensors((args[:1], given.get(_HIDDEN)))), 0)

    def change(name: str, x: Tensor) -> Tensor:
        known = name in _POSITIONS or any(word in name for word in MASKS)
        hidden = name in TABLES or x.dim() == (dims[0] or x.dim()) > 1
        if not known and hidden and x.is_floating_point() and x.size(-1) in widths:
            return x
        return to_inner_rows(sum_gradient_over_heads(x, context=context), context=context)

    module.register_forward_pre_hook(look, with_kwargs=True)
    _change_arguments(module, lambda name: None if name in BY_HEAD else functools.partial(change, name))


def slice_heads(attention: nn.Module, *, context: SplitContext, names: Sequence[str], heads: Layout, size: int) -> None:
    """Register a hook that cuts arguments `names` to this rank's heads. `heads`: layout of a dim of `size` heads."""
    own = heads.local((size,), mesh=context.world.mesh, rank=context.world.rank).slices[0]

    def take(x: Tensor) -> Tensor:
        """Return this rank's heads of (heads, …), (rows · heads, …) or (rows, heads, …); `x` if it lacks such a dim."""
        apart = x if x.dim() == 4 else x.unflatten(0, (-1, size)) if x.size(0) % size == 0 else x[None]
        if apart.size(1) != size:
            return x
        kept = to_inner_rows(sum_gradient_over_heads(apart, context=context), context=context)[:, own]
        return kept if x.dim() == 4 else kept.flatten(0, 1)

    def take_of_mask(x: Tensor) -> Tensor:
        """Return this rank's heads of (1 or rows, heads, …); `align_arguments` moves the rows."""
        return x[:, own] if x.dim() == 4 and x.size(1) == size else x

    changes = {name: take if name in BY_HEAD else take_of_mask for name in names}
    _change_arguments(attention, lambda name: changes.get(name))  # noqa: PLW0108 (torch.compile tells dicts' methods apart)


def _change_arguments(module: nn.Module, change: Callable[[str], Change | None]) -> None:
    """Register a hook that changes the tensors in arguments; `change` returns a function for a name, or None."""
    order = list(inspect.signature(module.forward).parameters)

    def changed(name: str, argument: Any) -> Any:
        how = change(name)
        return argument if how is None or argument is None else map_tensors(how, argument)

    def before(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> HookArguments:
        placed = [changed(name, argument) for name, argument in zip(order, args, strict=False)]
        return (*placed, *args[len(placed) :]), {name: changed(name, argument) for name, argument in given.items()}

    module.register_forward_pre_hook(before, with_kwargs=True)


def change_output(block: nn.Module, *, change: Change) -> None:
    """Register a hook that changes a block's output, or its first item; it raises ValueError for other outputs."""

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return change(output)
        if isinstance(output, tuple) and isinstance(output[0], Tensor):
            return (change(output[0]), *output[1:])
        raise ValueError(
            f"a block returned {type(output).__name__}; under tensor parallelism it must return hidden states, or a "
            "tuple that begins with them"
        )

    block.register_forward_hook(after)


def change_input(module: nn.Module, *, change: Change) -> None:
    """Register a hook that changes a module's first argument or `hidden_states`; it raises ValueError without them."""
    names = (*itertools.islice(inspect.signature(module.forward).parameters, 1), _HIDDEN)

    def before(hooked: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> HookArguments:
        if args and isinstance(args[0], Tensor):
            return (change(args[0]), *args[1:]), given
        if name := next((name for name in names if isinstance(given.get(name), Tensor)), ""):
            return args, {**given, name: change(given[name])}
        raise ValueError(f"{type(hooked).__name__} was called without hidden states; pass them first or as {_HIDDEN}")

    module.register_forward_pre_hook(before, with_kwargs=True)


class GatheredOutputs:
    """Record of the tensors in a model's current forward that are split, each with the function that gathers it."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[weakref.ref[Tensor], Change]] = {}

    def follow(self, model: nn.Module) -> None:
        """Register hooks on a model that gather its output, after the hooks that the model already has."""
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)

    def watch_hidden_states(self, module: nn.Module, *, context: SplitContext, features: int, given: bool) -> None:
        """Register hooks that note the hidden states that a module returns and, if `given`, those that it gets."""
        sizes = context.hidden_sizes(features)

        def whole() -> Change:
            now = dataclasses.replace(context, shard_sizes=context.shard_sizes.snapshot())
            return functools.partial(_whole_hidden_states, context=now, sizes=sizes)

        def before(_module: nn.Module, args: tuple[Any, ...], by_name: dict[str, Any]) -> None:
            self._note(list(itertools.islice(tensors((args, by_name)), 1)), whole())

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if not torch.compiler.is_dynamo_compiling():  # nothing but its hidden states leaves a compiled block
                self._note([output[0] if isinstance(output, tuple) else output], whole())

        module.register_forward_hook(after, prepend=True)
        if given:
            module.register_forward_pre_hook(before, with_kwargs=True)

    def watch_heads(self, attention: nn.Module, *, context: SplitContext, part: Part) -> None:
        """Register a hook that notes the attention weights after the first output: (rows, this rank's heads, …)."""
        inner = context.scheme.inner
        sizes = context.sizes(part.heads, axes=inner, cut=DimSplit(grain=part.grain))
        own = sizes[context.world.group(inner).index]
        whole = functools.partial(_all_heads, context=context, sizes=sizes)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            weights = output[1:] if isinstance(output, tuple) else ()
            if found := [x for x in tensors(weights) if x.dim() == 4 and x.size(1) == own]:
                self._note(found, whole)

        if len(sizes) > 1:
            attention.register_forward_hook(after)

    @gradient.uncompiled
    def _note(self, found: list[Any], whole: Change) -> None:
        self._parts |= {id(x): (weakref.ref(x), whole) for x in found if isinstance(x, Tensor)}

    def _begin(self, _model: nn.Module, _args: Any) -> None:
        self._parts.clear()

    def _end(self, _model: nn.Module, _args: Any, output: Any) -> Any:
        parts = {key: whole for key, (reference, whole) in self._parts.items() if reference() is not None}
        self._parts.clear()
        if not any(id(x) in parts for x in tensors(output)):
            return output
        made: dict[int, Tensor] = {}

        def leave(x: Tensor) -> Tensor:
            if id(x) not in parts:
                return x
            if id(x) not in made:
                made[id(x)] = parts[id(x)](x)
            return made[id(x)]

        return map_tensors(leave, output)


def _whole_hidden_states(x: Tensor, *, context: SplitContext, sizes: tuple[int, ...]) -> Tensor:
    """Return the hidden states with all tokens and all features; `sizes`: each rank's number of features."""
    if context.degree(context.scheme.tokens) > 1 and context.shard_sizes.tokens is not None:
        x = context.gather_tokens(x)
    return context.gather_features_of(x, sizes=sizes)


def _all_heads(x: Tensor, *, context: SplitContext, sizes: tuple[int, ...]) -> Tensor:
    """Return (rows of the hidden states, all heads, …) from (rows of the pair, this rank's heads, …)."""
    x = gradient.replicate(x, world=context.world, axes=context.scheme.inner, dim=1, sizes=sizes).wait()
    return to_hidden_rows(x, context=context)

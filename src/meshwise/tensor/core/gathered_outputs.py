"""Gather the hidden states and attention weights in a model's output.

Inside the blocks a rank may have a part of the hidden states, and it has the attention weights of its own heads. Some
models return such tensors besides their result. So hooks note which tensors of a forward are parts. After the forward,
each noted tensor in the output is gathered once."""

import functools
import itertools
import weakref
from typing import Any

from torch import Tensor, nn

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.layout.layout import DimSplit, Layout
from meshwise.tensor.core.activation_reshard import Change, to_stream_rows
from meshwise.tensor.core.part import Part
from meshwise.tensor.core.split_context import SplitContext


class GatheredOutputs:
    """Record of the tensors in a model's current forward that are parts, each with the function that gathers it."""

    def __init__(self) -> None:
        self._running = False
        self._parts: dict[int, tuple[weakref.ref[Tensor], Change]] = {}

    def follow(self, model: nn.Module) -> None:
        """Register hooks on a model that gather its output, after the hooks that the model already has."""
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)

    def watch_stream(self, module: nn.Module, *, context: SplitContext, features: int, given: bool) -> None:
        """Register hooks that note a module's returned hidden states and, with `given`, its input's hidden states."""

        def whole() -> Change:
            return functools.partial(
                _whole_stream, context=context, features=features, tokens=context.shard_sizes.tokens
            )

        def before(_module: nn.Module, args: tuple[Any, ...], by_name: dict[str, Any]) -> None:
            self._note(list(itertools.islice(tensors((args, by_name)), 1)), whole())

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            self._note([output[0] if isinstance(output, tuple) else output], whole())

        module.register_forward_hook(after, prepend=True)
        if given:
            module.register_forward_pre_hook(before, with_kwargs=True)

    def watch_heads(self, attention: nn.Module, *, context: SplitContext, part: Part) -> None:
        """Register a hook that notes the attention weights after the first output: (rows, this rank's heads, …)."""
        inner = context.scheme.inner
        sizes = context.sizes(Layout((inner,), cuts=(DimSplit(grain=part.grain),)), size=part.heads, axes=inner)
        own = sizes[context.world.group(inner).index]
        whole = functools.partial(_all_heads, context=context, sizes=sizes)

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, tuple):
                self._note([x for x in tensors(output[1:]) if x.dim() == 4 and x.size(1) == own], whole)

        if len(sizes) > 1:
            attention.register_forward_hook(after)

    def _note(self, found: list[Any], whole: Change) -> None:
        if self._running:
            self._parts |= {id(x): (weakref.ref(x), whole) for x in found if isinstance(x, Tensor)}

    def _begin(self, _model: nn.Module, _args: Any) -> None:
        self._running = True
        self._parts.clear()

    def _end(self, _model: nn.Module, _args: Any, output: Any) -> Any:
        self._running = False
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


def _whole_stream(x: Tensor, *, context: SplitContext, features: int, tokens: tuple[int, ...] | None) -> Tensor:
    """Return the hidden states with all tokens and all features; `tokens`: each rank's number of tokens."""
    axes = context.scheme.tokens
    if context.degree(axes) > 1 and tokens is not None:
        x = gradient.replicate(x, world=context.world, axes=axes, dim=-2, sizes=tokens).wait()
    return context.gather_features_of(x, sizes=context.stream_sizes(features))


def _all_heads(x: Tensor, *, context: SplitContext, sizes: tuple[int, ...]) -> Tensor:
    """Return (rows of the hidden states, all heads, …) from (rows of the pair, this rank's heads, …)."""
    x = gradient.replicate(x, world=context.world, axes=context.scheme.inner, dim=1, sizes=sizes).wait()
    return to_stream_rows(x, context=context)

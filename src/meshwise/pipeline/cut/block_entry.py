"""Blocks that a stage may begin in the middle of: the model's own forward runs them, module by module.

    Block                  a stage can begin at
    ├── attention_norm
    ├── attention          attention      received: the block's input, and the norm's output
    ├── mlp_norm           mlp_norm       received: the block's input, and the attention's output
    └── mlp                mlp

What the block does between its modules, the sums of a residual stream, runs on both sides of the boundary. So it has to
be its modules that hold all its parameters and run once each, in one order. Attention is too much to be done twice:
where the block itself calls it, once, it is as if in a module of its own, `block.scaled_dot_product_attention`. A block
is not opened that

- holds parameters itself, or reads them from its modules without calling these;
- has backward hooks, which see the gradients of all of it;
- has a list of equal modules, such as experts, where data may choose some;
- is called more than once, or again in the backward by torch's checkpoint, which would not know what was received.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from meshwise.model.parameter_reads import read_from_children
from meshwise.pipeline.cut.module_hooks import has_backward_hooks

CALL = functional.scaled_dot_product_attention.__name__
"""In a block, the name of the part that is its call of attention."""

_GIVEN = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class AttentionCall(nn.Module):
    """The module that a block's call of attention is as if in. It is no part of the model, and has no hooks: to what is
    drawn in it, it is the block that draws.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the attention call."""
        return functional.scaled_dot_product_attention(*args, **kwargs)


def laid_out(value: Tensor, *, like: Tensor) -> Tensor:
    """Return the value, in memory as another is: what attention gives is as its queries are, and a view may count on
    it.
    """
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    return value.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])


class AttentionCalls(TorchFunctionMode):
    """Inside, calls of attention are handed to another, with what they give by its names."""

    def __init__(self, to: Callable[..., Any]) -> None:
        super().__init__()
        self._to = to

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._to(**dict(zip(_GIVEN, args, strict=False)), **kwargs)
        return func(*args, **kwargs)


def module_at(model: nn.Module, *, name: str) -> nn.Module:
    """Return a module of the model; for a block's call of attention one that does the same."""
    around, _, own = name.rpartition(".")
    block = model.get_submodule(around)
    return AttentionCall() if own == CALL and CALL not in block._modules else model.get_submodule(name)


def inside(block: nn.Module) -> tuple[str, ...]:
    """Return the parts of a block that it could be cut between, by their names in it; none when it cannot be opened.

    Whether attention is one of them, that is called once by the block itself, is seen when it runs.
    """
    names = tuple(_called(block, ""))
    held = {id(parameter) for name in names for parameter in block.get_submodule(name).parameters()}
    if has_backward_hooks(block):
        return ()
    alone = any(id(parameter) not in held for parameter in block.parameters()) or read_from_children(block)
    if alone or len(names) < 2 or _chooses(block, names):
        return ()
    return names if CALL in block._modules else (*names, CALL)


def is_repeated() -> bool:
    """Return whether what runs now will be run again by torch's checkpoint, or, under a reentrant one, has no graph."""
    if not torch.is_grad_enabled():
        return True
    one = torch.ones((), requires_grad=True)
    product = one * one
    assert product.grad_fn is not None
    return type(product.grad_fn._raw_saved_self.data).__module__ == checkpoint.__module__  # type: ignore[attr-defined]


def _called(module: nn.Module, path: str) -> Iterator[str]:
    """Yield the modules with parameters that have a forward, through those that only hold others."""
    for name, child in module.named_children():
        if any(True for _ in child.parameters()):
            if _only_holds(child):
                yield from _called(child, f"{path}{name}.")
            else:
                yield f"{path}{name}"


def _chooses(block: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether modules of one list are of one kind."""
    lists: dict[str, list[type[nn.Module]]] = {}
    for name in names:
        if "." in name:
            lists.setdefault(name.rpartition(".")[0], []).append(type(block.get_submodule(name)))
    return any(len(set(kinds)) < len(kinds) for kinds in lists.values())


def _only_holds(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward

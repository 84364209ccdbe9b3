"""Blocks that a stage may begin in the middle of: the model's own forward runs them, module by module.

    Block                  a stage can begin at
    ├── attention_norm
    ├── attention          attention      received: the block's input, and the norm's output
    ├── mlp_norm           mlp_norm       received: the block's input, and the attention's output
    └── mlp                mlp

What the block does between its modules, the sums of a residual stream, runs on both sides of the boundary. So it has to
be its modules that hold all its parameters and run once each, in one order. A block is not opened that

- holds parameters itself, or reads them from its modules without calling these;
- has backward hooks, which see the gradients of all of it;
- has a list of equal modules, such as experts, where data may choose some;
- is called more than once, or again in the backward by torch's checkpoint, which would not know what was received.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwise.model.parameter_reads import read_from_children
from meshwise.pipeline.cut.module_hooks import has_backward_hooks


def inside(block: nn.Module) -> tuple[str, ...]:
    """Return the modules of a block that it could be cut between, by their names in it; none if it cannot be opened."""
    names = tuple(_called(block, ""))
    held = {id(parameter) for name in names for parameter in block.get_submodule(name).parameters()}
    if has_backward_hooks(block):
        return ()
    alone = any(id(parameter) not in held for parameter in block.parameters()) or read_from_children(block)
    return () if alone or len(names) < 2 or _chooses(block, names) else names


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

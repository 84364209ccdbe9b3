"""Find the blocks that can be divided between two stages, and the modules in them at which a stage can begin.

    Block                  a stage can begin at
    ├── attention_norm
    ├── attention          attention      received: the block's input, and the norm's output
    ├── mlp_norm           mlp_norm       received: the block's input, and the attention's output
    └── mlp                mlp

Such a block is a split block. The block's own code between the modules, such as residual sums, runs on both stages. So
its modules must hold all its parameters, and each must run once, in a fixed order. A block cannot be split if it

- holds parameters itself, or reads parameters of its modules without calling the modules;
- has backward hooks, or modules with backward hooks: a piece may have none;
- has a list of equal modules, such as experts, from which the data may choose;
- is called more than once, or again in the backward (torch's checkpoint), where the received values are missing."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwise.model.parameter_units import read_from_children


def inner_modules(block: nn.Module) -> tuple[str, ...]:
    """Return the names (relative to the block) of the modules at which a stage may begin; empty if there is none."""
    names = tuple(_modules_with_forward(block, ""))
    theirs = {id(parameter) for name in names for parameter in block.get_submodule(name).parameters()}
    if any(map(has_backward_hooks, block.modules())):
        return ()
    computes = any(id(parameter) not in theirs for parameter in block.parameters()) or read_from_children(block)
    return () if computes or len(names) < 2 or _has_equal_modules(block, names) else names


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks that see gradients."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def is_repeated() -> bool:
    """Return whether the running code is inside torch's checkpoint, and so will run again in the backward."""
    if not torch.is_grad_enabled():
        return True
    one = torch.ones((), requires_grad=True)
    product = one * one
    assert product.grad_fn is not None
    return type(product.grad_fn._raw_saved_self.data).__module__ == checkpoint.__module__  # type: ignore[attr-defined]


def _modules_with_forward(module: nn.Module, path: str) -> Iterator[str]:
    """Yield the names of the modules that have parameters and a forward; a ModuleList yields its inner modules."""
    for name, child in module.named_children():
        if any(True for _ in child.parameters()):
            if type(child).forward is nn.Module.forward:
                yield from _modules_with_forward(child, f"{path}{name}.")
            else:
                yield f"{path}{name}"


def _has_equal_modules(block: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether a list of modules in the block has two modules of one class, such as experts."""
    lists: dict[str, list[type[nn.Module]]] = {}
    for name in names:
        if "." in name:
            lists.setdefault(name.rpartition(".")[0], []).append(type(block.get_submodule(name)))
    return any(len(set(kinds)) < len(kinds) for kinds in lists.values())

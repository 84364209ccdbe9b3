"""A model's stack of like blocks, and the same model with fewer of them.

Blocks are equal when their modules have the same classes and tensors of the same shapes. Besides, one run of the whole
model must do the same for each of them, operation by operation, because a forward may treat any block differently.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwise.base.tensor_tree import tensors
from meshwise.engine.parallelize import Options
from meshwise.model.deferred_init import shapes_of
from meshwise.model.dispatch_modes import TorchDispatchMode
from meshwise.model.parameter_table import ParameterOptions, matrices_decay
from meshwise.plan import Plan
from meshwise.plan.plan_keys import Offload
from meshwise.simulate.block_growth import BlockGrowth, UnevenError, lengthened

LEAST = 20
"""Of a stack. A lower one is run as quickly as three that stand for it."""


@dataclass(frozen=True)
class BlockStack:
    """Like blocks that follow one another in a list."""

    name: str
    """Of the list."""
    start: int
    """Where the first of them is."""
    count: int
    """How many they are; of a model without such a stack, 0."""

    def lowered(self, model: nn.Module, *, count: int) -> nn.Module:
        """Return the model with so many of them, the first and the last; everything else is shared with it."""
        blocks = model.get_submodule(self.name)
        names, last = list(blocks._modules), count // 2
        left = [*names[: self.start + count - last], *names[self.start + self.count - last :]]
        fewer = {str(number): blocks._modules[name] for number, name in enumerate(left)}
        return _with(model, self.name.split("."), fewer)


NONE = BlockStack("", 0, 0)


def all_alike(plan: Plan, *, options: Options) -> bool:
    """Return whether a plan treats like blocks in the same way, so that a few can represent many.

    Not where its names tell one from another, and not where how much they all take decides what is done.
    """
    recomputed = [[entry] if isinstance(entry, str) else entry for entry in options.recomputed]
    names = itertools.chain(options.tensor_rules or (), *recomputed)
    by_number = any(character.isdigit() for character in "".join(names))
    return plan.pp == 1 and plan.tiers == Offload() and not (plan.budget or by_number or options.parts)


def _with(module: nn.Module, path: Sequence[str], children: dict[str, nn.Module | None]) -> nn.Module:
    """Return a module with other children at the end of a path through it."""
    shell = copy.copy(module)
    if path:
        children = {**module._modules, path[0]: _with(module.get_submodule(path[0]), path[1:], children)}
    vars(shell)["_modules"] = children
    return shell


def stack_of(
    model: nn.Module, *, batch: Any, forward: Callable[..., Any], options: ParameterOptions | None = None
) -> BlockStack:
    """Return the highest stack of a model on the meta device, which is left as it is; `NONE` where none is high enough.

    `forward(model, batch)` runs it. `options`: of the optimizer, by which blocks may differ.
    """
    stacks = list(_stacks(model, options or matrices_decay))
    stack = max(stacks, key=lambda stack: stack.count, default=NONE)
    if stack.count < LEAST:
        return NONE

    def told(three: Sequence[Sequence[Hashable]], more: int) -> BlockStack:
        growth = BlockGrowth.of(three)
        if not growth.added or [three[0][index] for index, _ in growth.places(more)] != whole:
            raise UnevenError
        return stack

    try:
        whole = _seen(model, batch, forward)
        found = lengthened(
            lambda count: _seen(stack.lowered(model, count=count), batch, forward), count=stack.count, longer=told
        )
    except Exception:  # noqa: BLE001 -- a model that does not run so, or not with fewer blocks, is taken as it is
        return NONE
    return found or NONE


def _stacks(model: nn.Module, options: ParameterOptions) -> Iterator[BlockStack]:
    """Yield runs of like blocks in all lists of a model."""
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    holders = Counter(id(tensor) for _, tensor in held)
    for name, blocks in model.named_modules():
        if name and isinstance(blocks, nn.ModuleList | nn.Sequential) and len(blocks) >= LEAST:
            kinds = [_kind(block, f"{name}.{number}", options, holders) for number, block in enumerate(blocks)]
            start = 0
            for kind, run in itertools.groupby(kinds):
                count = len(list(run))
                if kind is not None:
                    yield BlockStack(name, start, count)
                start += count


def _kind(block: nn.Module, around: str, options: ParameterOptions, holders: Counter[int]) -> Hashable:
    """Return a key that like blocks share; None for a block without parameters or with shared tensors."""
    named = [*block.named_parameters(), *block.named_buffers()]
    if not any(True for _ in block.parameters()) or any(holders[id(tensor)] > 1 for _, tensor in named):
        return None
    return (
        tuple((name, type(module)) for name, module in block.named_modules()),
        tuple((name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in named),
        tuple(tuple(sorted(options(f"{around}.{name}", tensor).items())) for name, tensor in block.named_parameters()),
    )


def _seen(model: nn.Module, batch: Any, forward: Callable[..., Any]) -> list[Hashable]:
    """Return the operations of a forward and its backward, with their results. Blocks that are run again in the
    backward, or have no gradient, do the same forward as others.
    """
    seen = _Seen()
    bare = shapes_of(model, seed=0).module
    with seen:
        followed = [one for one in tensors(forward(bare, batch)) if one.requires_grad]
        torch.autograd.backward(followed, [torch.ones_like(one) for one in followed])
    return seen.operations


class _Seen(TorchDispatchMode):
    """Notes the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Hashable] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.operations.append((func, *((one.shape, one.dtype) for one in tensors(output))))
        return output

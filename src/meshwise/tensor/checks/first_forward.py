"""Watch a model's first forward for reads of split parameters by other modules, and for the order of blocks.

A sharded part needs its module to be called. A forward can take the module's weight instead,

    return functional.linear(x, self.embedding.weight)          # a head tied by use, not by registration

and compute with what this rank has of it as if that were all. And where the stream is cut at the first of a list of
blocks and put together behind the last, the model may call them in another order. So the graph that the first training
forward leaves behind is looked through, and the blocks are followed; then all that is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from meshwise.base.tensor_tree import reachable

_READERS = ("_Multiply", "_Depart", "Embedding")
"""How the names of operations begin that parts give their parameters to: a product, a collective, a look-up."""

_CONVERTS = ("ToCopy", "Split")
"""Those that only hand on a parameter, in another dtype or in parts: torch's attention has three matrices in one."""


class FirstForward:
    """Watches a model until its first forward with gradients is over.

    split    names of the parameters that only their modules may read
    stacks   the blocks, by name and in order, of each list where the stream is cut and put together
    """

    def __init__(
        self, model: nn.Module, *, split: Mapping[Tensor, str], stacks: Sequence[Mapping[str, nn.Module]]
    ) -> None:
        self._split = split
        self._stacks = stacks
        self._called: list[int] = []
        self._ran: set[int] = set()
        self._blocks: list[RemovableHandle] = []
        self._ends = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end),
        ]

    def _begin(self, model: nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._called = [0] * len(self._stacks)
        if self._blocks or not self._stacks:
            return
        inside: set[nn.Module] = set()
        for stack, blocks in enumerate(self._stacks):
            for place, block in enumerate(blocks.values()):
                inside.update(block.modules())
                self._follow(block, functools.partial(self._call, stack, place))
        for module in model.modules():
            if module not in inside and any(True for _ in module.parameters(recurse=False)):
                self._follow(module, functools.partial(self._call, None, 0))

    def _follow(self, module: nn.Module, call: Callable[[], None]) -> None:
        self._blocks.append(module.register_forward_pre_hook(lambda _module, _args: call(), prepend=True))

    def _call(self, stack: int | None, place: int) -> None:
        """Note that a block, or another module with parameters, is called."""
        for other, expected in enumerate(self._called):
            if expected != (place if other == stack else 0):
                self._refuse_order(other)
        if stack is not None:
            self._ran.add(stack)
            self._called[stack] = (place + 1) % len(self._stacks[stack])

    def _end(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for stack, place in enumerate(self._called):
            if place:
                self._refuse_order(stack)
        by_hand = [blocks for stack, blocks in enumerate(self._stacks) if stack not in self._ran]
        unseen: dict[Tensor, Mapping[str, nn.Module]] = {
            x: blocks for blocks in by_hand for block in blocks.values() for x in block.parameters()
        }
        for parameter, reader in _reads(output):
            if parameter in unseen:
                first, *_ = unseen[parameter]
                raise ValueError(
                    f"{first} and the blocks behind it run without being called, as block.forward(x): the stream is "
                    "cut and put together where they are called. Call them as block(x)"
                )
            name = self._split.get(parameter)
            if name is not None and not reader.startswith(_READERS):
                raise ValueError(
                    f"{name} is split over the ranks of tp, and the forward computes with it ({reader}) without "
                    "calling the module that holds it: with this rank's part, as if that were all. Call the module; "
                    f'or keep the module around it whole on every rank, by a rule such as "{name.rpartition(".")[0]}": '
                    '"whole"'
                )
        for handle in (*self._blocks, *self._ends):
            handle.remove()

    def _refuse_order(self, stack: int) -> NoReturn:
        first, *_, last = self._stacks[stack]
        raise ValueError(
            f"the stream is cut where {first} begins and put together where {last} ends, and the model does not call "
            "these blocks and all between them in the order of their list, and nothing else that has parameters. Let "
            "it do so, or take tp_mode=1d sequence_parallel=0"
        )


def _reads(output: Any) -> Iterator[tuple[Tensor, str]]:
    """Yield the leaves of the graph behind the tensors of an output, each with what computed with it."""
    waiting = [tensor.grad_fn for tensor in reachable(output) if tensor.grad_fn is not None]
    seen: set[Node] = set(waiting)
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            read = following
            while read is not None and read.name().startswith(_CONVERTS):
                read = read.next_functions[0][0]
            leaf = getattr(read, "variable", None)
            if leaf is not None and not node.name().startswith(_CONVERTS):
                yield leaf, node.name()
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)

"""What a tensor was made of, and who sums the gradient of that.

What each rank uses for its own heads gets a gradient from each of them. Somebody has to sum those, once:

    bias = outer                      from outside of the blocks, alike on all ranks: a copy sums, on the way back
    bias = self.table(places)         a parameter that all ranks have whole, in a block: what each rank makes of its
                                      gradient, of its tokens or heads, is summed with the gradients of the step
    bias = copied * 2                 copied already, around this module

The graph behind a tensor, up to the last collective, tells which it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from meshwise.comm import gradient
from meshwise.tensor.matmul import Operation
from meshwise.tensor.scheme import Axes


class Origins:
    """The parameters of one model, and the axes over which the gradient of each is summed in the end."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._summed: Mapping[str, Axes] = {}
        self._names: dict[Tensor, str] = {}

    def follow(self, model: nn.Module, *, summed: Mapping[str, Axes]) -> None:
        """`summed`: by all names of a parameter; of those that are not in it nothing is summed."""
        self._model, self._summed = model, summed
        model.register_forward_pre_hook(self._begin, prepend=True)

    def unsummed(self, x: Tensor, *, axes: Axes) -> Axes:
        """Of these axes, those over which nobody behind `x` sums what its gradient is on each rank.

        Raises ValueError when somebody does behind a part of what `x` was made of, and nobody behind another.
        """
        found = {tuple(axis for axis in axes if axis in self._at(origin)): origin for origin in origins(x)}
        if len(found) > 1:
            known = self._known()
            names = [known[origin] for origin in found.values() if isinstance(origin, Tensor) and origin in known]
            raise ValueError(
                "what an attention, or another module around a pair, is handed besides the stream is made of "
                f"something that is trained in its block ({', '.join(names)}) and of something that comes from "
                "elsewhere. Each rank of tp uses it for its own heads, and the gradients of the one are summed in "
                "another place than those of the other. Hand them over as two arguments, and add them up inside"
            )
        done = next(iter(found), ())
        return tuple(axis for axis in axes if axis not in done)

    def _at(self, origin: Tensor | Node) -> Axes:
        if isinstance(origin, Node):
            return gradient.partial_over(origin) or ()
        name = self._known().get(origin)
        return () if name is None else self._summed[name]

    def _known(self) -> Mapping[Tensor, str]:
        if not self._names and self._model is not None:
            held = self._model.named_parameters(remove_duplicate=False)
            self._names = {parameter: name for name, parameter in held if name in self._summed}
        return self._names

    def _begin(self, _model: nn.Module, _args: Any) -> None:
        self._names = {}  # an engine may have put others in their place


def _operation(node: Node) -> Any:
    return getattr(node, "operation", None)


def origins(x: Tensor) -> Iterator[Tensor | Node]:
    """What a tensor was made of since the last products and collectives, as far as it is trained, and those."""
    if x.is_leaf:
        yield x
    for node in _nodes(x, past=False):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        elif gradient.partial_over(node) is not None:
            yield node


def leaves(x: Tensor) -> Iterator[Tensor]:
    """What a tensor was made of that is trained."""
    if x.is_leaf:
        yield x
    for node in _nodes(x, past=True):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf


def _nodes(x: Tensor, *, past: bool) -> Iterator[Node]:
    """The graph behind a tensor; `past`: past the collectives."""
    waiting: list[Node] = [x.grad_fn] if x.grad_fn is not None else []
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        if not past and (gradient.partial_over(node) is not None or isinstance(_operation(node), Operation)):
            continue
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting.extend(following)

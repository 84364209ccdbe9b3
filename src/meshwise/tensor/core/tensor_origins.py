"""Find what a tensor was made of, and where the gradients of those origins are summed.

What each rank uses for its own heads gets a gradient from each of them. They must be summed exactly once:

    | bias = outer                      from outside of the blocks, alike on all ranks: a copy sums, on the way back
    | bias = self.table(places)         a parameter that all ranks have whole, in a block: what each rank makes of its
    |                                   gradient, of its tokens or heads, is summed with the gradients of the step
    | bias = copied * 2                 copied already, around this module

The graph behind a tensor, up to the last product or collective, shows which case it is.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.model.parameter_table import Placement
from meshwise.tensor.core.matmul import MatmulCollectives
from meshwise.tensor.core.scheme import Axes


class TensorOrigin(NamedTuple):
    """Something that a tensor was made of.

    | name     of the parameter that it is, or ""
    | summed   the axes over which the gradients of all ranks are summed behind it
    | split    the axes over which ranks have parts of it
    """

    name: str
    summed: Axes
    split: Axes


class TensorOrigins:
    """The parameters of one model, and where the gradient of each is summed in the end."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._placed: Mapping[str, Placement] = {}
        self._names: dict[Tensor, str] = {}

    def follow(self, model: nn.Module, *, placed: Mapping[str, Placement]) -> None:
        """`placed`: every parameter, by all of its names."""
        self._model, self._placed = model, placed
        model.register_forward_pre_hook(self._begin, prepend=True)

    def unsummed(self, x: Tensor, *, axes: Axes) -> Axes:
        """Return those axes over which no collective behind `x` sums its gradient.

        Raises ValueError when some origins of `x` are summed behind it and others are not.
        """
        found = {tuple(axis for axis in axes if axis in each.summed): each for each in self.of(x, axes=axes)}
        if len(found) > 1:
            names = ", ".join(sorted(each.name for each in found.values() if each.name))
            raise ValueError(
                f"an argument of an attention is computed from {names}, which is trained in its block, and from a "
                "tensor of another place. Each rank of tp uses it for its own heads, and the two gradients are summed "
                "in different places. Pass two arguments, and add them up inside"
            )
        done = next(iter(found), ())
        return tuple(axis for axis in axes if axis not in done)

    def of(self, x: Tensor, *, axes: Axes) -> Iterator[TensorOrigin]:
        """Yield the trained tensors and products that `x` was made of since the last collectives over these axes."""
        if x.is_leaf:
            yield self._leaf(x, axes=axes)
        waiting: list[Node] = [x.grad_fn] if x.grad_fn is not None else []
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            leaf, origin = getattr(node, "variable", None), _made(node, axes=axes)
            if leaf is not None:
                yield self._leaf(leaf, axes=axes)
            elif origin is not None:
                yield origin
            else:
                following = {each for each, _ in node.next_functions if each is not None} - seen
                seen |= following
                waiting.extend(following)

    def _leaf(self, x: Tensor, *, axes: Axes) -> TensorOrigin:
        """Return a parameter; or what came from another stage, or into a forward that is repeated: it may be a part."""
        if not self._names and self._model is not None:
            held = self._model.named_parameters(remove_duplicate=False)
            self._names = {parameter: name for name, parameter in held if name in self._placed}
        name = self._names.get(x, "")
        return (
            TensorOrigin(name, self._placed[name].summed, self._placed[name].layout.axes)
            if name
            else TensorOrigin("", (), axes)
        )

    def _begin(self, _model: nn.Module, _args: Any) -> None:
        self._names = {}  # an engine may have put others in their place


def _made(node: Node, *, axes: Axes) -> TensorOrigin | None:
    """Return the origin that a product or a collective over some of these axes gave, or None."""
    operation = getattr(node, "operation", None)
    if isinstance(operation, MatmulCollectives):
        alike = operation.y.axes if operation.y.dim is None else ()
        return TensorOrigin("", (), tuple(axis for axis in axes if axis not in alike))
    given = gradient.source_of_output(node)
    if given is None or not {*given.whole, *given.alike, *given.split}.intersection(axes):
        return None
    return TensorOrigin("", given.whole, given.split)

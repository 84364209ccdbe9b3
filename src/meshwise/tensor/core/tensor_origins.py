"""Find over which axes the gradient of a tensor is already summed by what the tensor was computed from.

Each rank uses an argument of an attention for its own heads. The gradients of all heads must be summed exactly once:

    | bias = outer                      from outside of the blocks, equal on all ranks: a copy sums in the backward
    | bias = self.table(places)         a parameter of a block that all ranks have whole: its gradients, of each rank's
    |                                   tokens or heads, are summed at the end of the step
    | bias = copied * 2                 copied already, around this module
    | value = first_block_value         made by a product: each rank has the heads that it made

The nearest parameter, product or collective in the graph behind a tensor shows which case it is.
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.autograd.graph import Node

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.model.parameter_table import Placement
from meshwise.tensor.core.matmul import MatmulCollectives
from meshwise.tensor.core.scheme import Axes


class TensorOrigins:
    """The parameters of one model, and the axes over which the step sums the gradient of each."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._placed: Mapping[str, Placement] = {}
        self._summed: dict[Tensor, Axes] = {}

    def follow(self, model: nn.Module, *, placed: Mapping[str, Placement]) -> None:
        """Read the placements of a model's parameters: `placed` has every parameter, by all of its names."""
        self._model, self._placed = model, placed
        # an engine may have replaced the parameters since the last forward
        model.register_forward_pre_hook(lambda *_: self._summed.clear(), prepend=True)

    def unsummed(self, x: Tensor, *, axes: Axes) -> Axes:
        """Return the axes of `axes` over which nothing behind `x` sums its gradient."""
        summed = self._summed_behind(x, axes=axes)
        return tuple(axis for axis in axes if axis not in summed)

    def _summed_behind(self, x: Tensor, *, axes: Axes) -> Axes:
        """Return the axes over which the nearest parameter, product or collective behind `x` sums gradients."""
        if x.is_leaf:
            return self._at_leaf(x)
        waiting: list[Node] = [x.grad_fn] if x.grad_fn is not None else []
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            leaf = getattr(node, "variable", None)
            summed = _summed_by(node, axes=axes) if leaf is None else self._at_leaf(leaf)
            if summed is not None:
                return summed
            following = [each for each, _ in node.next_functions if each is not None and each not in seen]
            seen.update(following)
            waiting += following
        return ()

    def _at_leaf(self, x: Tensor) -> Axes:
        """Return the axes of a parameter; none of a tensor from another stage, or of a repeated forward."""
        if not self._summed and self._model is not None:
            named = self._model.named_parameters(remove_duplicate=False)
            self._summed = {value: self._placed[name].summed for name, value in named if name in self._placed}
        return self._summed.get(x, ())


def _summed_by(node: Node, *, axes: Axes) -> Axes | None:
    """Return the axes over which a product or a collective sums gradients; None for any other node."""
    operation = getattr(node, "operation", None)
    if isinstance(operation, MatmulCollectives):
        replicated = operation.y.axes if operation.y.dim is None else ()
        return tuple(axis for axis in axes if axis not in replicated)
    source = gradient.source_of_output(node)
    if source is None or not {*source.whole, *source.replicated, *source.split}.intersection(axes):
        return None
    return source.whole

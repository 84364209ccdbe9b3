"""Find the axes over which a tensor's gradient is summed already, from the graph that computed the tensor.

Each rank uses an argument of an attention for its own heads, and the gradients of all heads must be summed exactly
once. Whether the attention has to sum them depends on the origin of the argument:

    | bias = outer                 equal on all ranks, from outside of the blocks: here `gradient.copy` must sum
    | bias = self.table(places)    from a parameter that all ranks have whole: the end of the step sums its gradient
    | bias = copied * 2            from the output of a `gradient.copy` in a module around this one, which sums
    | value = first_block_value    from a matmul: each rank has only its own heads, so nothing is summed

The nearest parameter, matmul or collective in the graph behind the tensor decides the case."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.autograd.graph import Node

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.model.parameter_table import Placement
from meshwise.tensor.core.matmul import MatmulCollectives
from meshwise.tensor.schemes import Axes


class TensorOrigins:
    """Search of the graph behind a tensor. It knows over which axes the step sums each parameter's gradient."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._placed: Mapping[str, Placement] = {}
        self._summed: dict[Tensor, Axes] = {}

    def follow(self, model: nn.Module, *, placed: Mapping[str, Placement]) -> None:
        """Set the model and its parameters' placements, and register a hook; `placed` has all names of a parameter."""
        self._model, self._placed = model, placed
        # an engine may have replaced the parameters since the last forward
        model.register_forward_pre_hook(lambda *_: self._summed.clear(), prepend=True)

    def summed_behind(self, x: Tensor, *, axes: Axes) -> Axes:
        """Return the axes over which the nearest parameter, matmul or collective behind `x` sums its gradient."""
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
        """Return the axes over which the step sums the gradient of leaf `x`; () if `x` is no parameter."""
        if not self._summed and self._model is not None:
            named = self._model.named_parameters(remove_duplicate=False)
            self._summed = {value: self._placed[name].summed for name, value in named if name in self._placed}
        return self._summed.get(x, ())


def _summed_by(node: Node, *, axes: Axes) -> Axes | None:
    """Return the axes over which a matmul or a collective sums gradients; None for any other node."""
    operation = getattr(node, "operation", None)
    if isinstance(operation, MatmulCollectives):
        replicated = operation.y.axes if operation.y.dim is None else ()
        return tuple(axis for axis in axes if axis not in replicated)
    source = gradient.source_of_output(node)
    if source is None or not {*source.whole, *source.replicated, *source.split}.intersection(axes):
        return None
    return source.whole

"""Run the backward of a stage in two parts: first I for the gradients of received values, later W for parameters.

Two calls of autograd would compute the shared path twice. But a node of the graph, such as a matrix product, computes
the gradients of its two operands separately. Autograd omits a gradient that is not requested. So:

    output ──► n4 ──► n3 ──► n2 ──► n1 ──► received          the spine: nodes that lead to received values
               │             │
               ▼             ▼                               I runs the spine, and keeps the gradients at n4 and n2
              W b           W a                              W starts again at n4 and at n2, towards the parameters

After I, the saved tensors that W does not need are freed (Qi et al., 2023; torch's pipelining does the same).

A parameter gets its gradient already in I in three cases. If paths to it leave the spine at several nodes, W would run
the nodes between these places twice. If a path misses the spine, W has no node there to start at. Behind torch's
checkpoint, W would have to recompute.

`enter` prepares received values, so that a backward sets their gradients without a copy."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import checkpoint

from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.model.torch_private import graph_nodes

Gradients: TypeAlias = Sequence[Tensor | None]
"""Gradient of each output of a node; None for an output without a gradient."""


class StageEntrance(torch.autograd.Function):
    """Identity for received leaves. The result is no leaf and no view, so a model may change it in place.

    Its backward stores the gradient as the leaf's `.grad` without a copy. torch would copy a gradient that another
    object refers to, such as the sender of a value that the stage passes on unchanged."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        """Return a tensor in the memory of the leaf."""
        ctx.leaf = leaf
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        """Set the leaf's `.grad`, or add to it, and return None, so that torch adds nothing."""
        leaf = ctx.leaf
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def entered(leaf: Tensor) -> Tensor:
    """Return `leaf` passed through a `StageEntrance`, for the stage to use."""
    inside: Tensor = StageEntrance.apply(leaf)
    return inside


def enter(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return received values for a stage to use: each leaf that requires a gradient passes one `StageEntrance`."""
    leaves = {id(tensor): tensor for tensor in tensors(dict(values)) if tensor.requires_grad and tensor.is_leaf}
    made = {key: entered(leaf) for key, leaf in leaves.items()}
    inside: dict[str, Any] = map_tensors(lambda tensor: made.get(id(tensor), tensor), dict(values))
    return inside


class WeightBackward:
    """Second part of a backward (W), to run after the first part (I). A second `run` does nothing."""

    def __init__(self, edges: Sequence[GradientEdge] = ()) -> None:
        """`edges`: of the outputs. They keep the graph alive until W has run; a node does not (torch 2.11)."""
        self._edges = edges
        self._pending: list[Callable[[], None]] = []

    def later(self, work: Callable[[], None]) -> None:
        """Add work to the second part."""
        self._pending.append(work)

    def run(self) -> None:
        """Run W: accumulate the gradients of the parameters into their `.grad`."""
        while self._pending:
            self._pending.pop(0)()
        self._edges = ()


def backward_input(
    outputs: Sequence[Tensor], *, gradients: Sequence[Tensor], received: Sequence[Tensor], parameters: Iterable[Tensor]
) -> WeightBackward:
    """Run I: accumulate the gradients of the leaves `received` into their `.grad`, and return W for the parameters.

    `gradients`: of `outputs`, which require gradients. If the graph contains no received value, W is the whole
    backward. If it contains a reentrant checkpoint, I is the whole backward, and W does nothing."""
    trained = {parameter: _node(parameter) for parameter in parameters if parameter.requires_grad}
    edges = [*map(torch.autograd.graph.get_gradient_edge, outputs)]
    graph = _Graph([edge.node for edge in edges])
    spine, _ = graph.above({_node(leaf) for leaf in received})
    later = WeightBackward(edges)
    if graph.is_reentrant:
        torch.autograd.backward(outputs, gradients)
        return later
    if not spine:
        if reached := [parameter for parameter, node in trained.items() if node in graph.nodes]:
            later.later(partial(torch.autograd.backward, edges, gradients, inputs=reached))
        return later
    places = {parameter: graph.entrances(node, spine=spine) for parameter, node in trained.items()}
    again = {  # nodes whose saved tensors torch's non-reentrant checkpoint recomputes
        node
        for node in set().union(*places.values())
        if node is not None and any(type(saved.data).__module__ == checkpoint.__module__ for saved in _saved(node))
    }
    now = [parameter for parameter, nodes in places.items() if len(nodes) > 1 or None in nodes or nodes & again]
    hooks = []
    single = (node for nodes in places.values() if len(nodes) == 1 for node in nodes)
    for place in dict.fromkeys(node for node in single if node is not None and node not in again):
        hanging = [parameter for parameter, nodes in places.items() if nodes == {place}]
        hooks.append(place.register_prehook(partial(_arrived, later, place, hanging)))
    torch.autograd.backward(
        outputs, gradients, inputs=[*(leaf for leaf in received if _node(leaf) in graph.nodes), *now], retain_graph=True
    )
    for hook in hooks:
        hook.remove()
    kept = set().union(*places.values())
    for node in graph.nodes:
        if node in spine and node not in kept:
            _forget(node)
    return later


def split_pays(received: Sequence[Tensor], *, parameters: Sequence[Tensor]) -> bool:
    """Return whether a separate W saves more time than its calls of autograd cost, 0.1 ms for each parameter.

    True from 2^21 multiplications per parameter tensor on, and on meta: a rehearsal counts W apart from B."""
    rows = max((leaf.numel() // max(1, leaf.shape[-1]) for leaf in received if leaf.dim()), default=0)
    products = rows * sum(parameter.numel() for parameter in parameters)
    return any(one.is_meta for one in parameters) or products >= len(parameters) << 21


def is_reentrant(values: Iterable[Tensor]) -> bool:
    """Return whether a node of torch's reentrant checkpoint is in the graph of these values."""
    return _Graph([value.grad_fn for value in values if value.grad_fn is not None]).is_reentrant


def _arrived(later: WeightBackward, place: Node, parameters: Sequence[Tensor], gradients: Gradients) -> None:
    """Add to W the backward from `place` to the parameters, with the gradients that arrive there in I."""
    if any(gradient is not None for gradient in gradients):
        later.later(partial(_leave, place, parameters, gradients))


def _leave(place: Node, parameters: Sequence[Tensor], gradients: Gradients) -> None:
    """Run the backward from a node of the spine to the parameters, with the gradients that arrived there in I.

    Hooks on the node's tensor have already changed these gradients in I. Autograd calls the hooks again here, so one
    more hook, called last, puts the gradients of I back."""
    arrived = [(index, gradient) for index, gradient in enumerate(gradients) if gradient is not None]
    hook = place.register_prehook(lambda _: tuple(gradients))
    edges = [GradientEdge(place, index) for index, _ in arrived]
    torch.autograd.backward(edges, [gradient for _, gradient in arrived], inputs=parameters)
    hook.remove()


def _forget(node: Node) -> None:
    """Free the saved tensors of a node that will not run again.

    0-dim tensors stay: autograd saves numbers as such, as a dropout's factor, and a rehearsal cannot free them."""
    for saved in _saved(node):
        if isinstance(saved.data, Tensor) and saved.data.dim():
            with contextlib.suppress(RuntimeError):  # a tier or the model has put hooks on the saved tensor
                saved.register_hooks(lambda _: None, lambda _: None)


def _saved(node: Node) -> Iterator[Any]:
    """Yield the SavedTensor objects of a node; their `data` is the tensor or the result of a pack hook."""
    for name in _saved_by(type(node)):
        some = getattr(node, name)
        yield from some if isinstance(some, list | tuple) else (some,)


@cache
def _saved_by(kind: type[Node]) -> tuple[str, ...]:
    """Return the names of the attributes in which a class of nodes keeps its saved tensors."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _node(leaf: Tensor) -> Node:
    """Return the node that accumulates a leaf's gradient."""
    return torch.autograd.graph.get_gradient_edge(leaf).node


class _Graph:
    """Autograd graph from some output nodes down to the leaves; the order of its nodes is deterministic."""

    def __init__(self, roots: Sequence[Node]) -> None:
        self.nodes = dict.fromkeys(graph_nodes(roots))
        self._roots = set(roots)
        self._above: dict[Node, set[Node]] = {}
        for node, (below, _) in ((one, edge) for one in self.nodes for edge in one.next_functions):
            if below is not None:
                self._above.setdefault(below, set()).add(node)
        self.is_reentrant = any(node.name() == "CheckpointFunctionBackward" for node in self.nodes)
        """True if a node is torch's reentrant checkpoint: it runs a whole backward, which cannot be split."""

    def above(self, starts: Iterable[Node], *, until: AbstractSet[Node] = frozenset()) -> tuple[set[Node], set[Node]]:
        """Search from `starts` towards the outputs, and stop at nodes of `until`.

        Return the nodes found, with the starts, and the nodes of `until` at which the search stopped."""
        found: set[Node] = set()
        ends: set[Node] = set()
        waiting = [start for start in starts if start in self.nodes]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                above = self._above.get(node, set())
                ends |= above & until
                waiting += above - until
        return found, ends

    def entrances(self, leaf: Node, *, spine: set[Node]) -> set[Node | None]:
        """Return the nodes at which paths to the leaf leave the spine, and None for a path that misses the spine."""
        passed, ends = self.above([leaf], until=spine)
        return {*ends, *((None,) if passed & self._roots else ())}

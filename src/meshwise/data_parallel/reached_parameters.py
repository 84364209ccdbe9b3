"""Which parameters a backward will reach.

A unit's gradient is complete when every parameter that takes part has arrived. The parameters that take part can change
from batch to batch (a branch not taken, an expert not chosen). A unit that waited for a gradient that never comes would
be reduced only after the backward. The graph of the loss says it beforehand.
"""

from __future__ import annotations

from torch import Tensor


def reached(loss: Tensor) -> set[int] | None:
    """Return the ids of the leaf tensors whose gradient `loss.backward()` accumulates.

    Returns None when the graph does not show them. A reentrant checkpoint runs its own backwards inside this one: its
    parameters arrive unannounced, and those with further uses arrive more than once.
    """
    leaves: set[int] = set()
    seen = set()
    stack = [] if loss.grad_fn is None else [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "CheckpointFunctionBackward":
            return None
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.add(id(variable))
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return leaves

"""Which parameters a backward will reach.

A unit's gradient is complete when every parameter that takes part has arrived. Which ones take part can change from
batch to batch (a branch not taken, an expert nobody chose), and a unit that waited for a gradient that never comes
would be reduced only when the backward is over. The graph of the loss says it beforehand.
"""

from __future__ import annotations

from torch import Tensor


def reached(loss: Tensor) -> set[int]:
    """The ids of the leaf tensors whose gradient `loss.backward()` accumulates."""
    leaves: set[int] = set()
    seen = set()
    stack = [] if loss.grad_fn is None else [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.add(id(variable))
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return leaves

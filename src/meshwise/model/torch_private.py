"""Wrap functions of torch's private modules, for dispatch modes and for the running backward."""

import contextlib
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode", "in_backward", "needed_gradients", "without_modes"]


def in_backward() -> bool:
    """Return whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def needed_gradients(ctx: Any) -> tuple[bool, ...]:
    """Return, for each argument of an autograd function, whether the running backward needs its gradient.

    `ctx`: the function's context. A part of a split backward needs fewer gradients than `ctx.needs_input_grad` says.
    """
    nodes = (node for node, _ in ctx.next_functions if node is not None)  # of each argument that needs a gradient
    return tuple(need and _runs(next(nodes)) for need in ctx.needs_input_grad)


def _runs(node: Node) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch does not answer for a leaf of `autograd.grad`
        return True


def without_modes() -> contextlib.AbstractContextManager[None]:
    """Inside the block, hide operations from all dispatch modes, because they do not belong to the model's step."""
    hidden: contextlib.AbstractContextManager[None] = _disable_current_modes()
    return hidden

"""Watching torch's operations, and not being watched: torch documents how, and keeps the names in a private module."""

import contextlib
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode", "asked_for", "in_backward", "unseen"]


def in_backward() -> bool:
    """Return whether autograd is running a backward in this thread, which may repeat a part of a forward."""
    return torch._C._current_graph_task_id() != -1


def asked_for(ctx: Any) -> tuple[bool, ...]:
    """Return which gradients the running backward asks an autograd function for, argument by argument: in one part of a
    backward, not all that its tensors need.

    torch leaves that out for its own nodes; theirs, for everybody's, is private.
    """
    nodes = (node for node, _ in ctx.next_functions if node is not None)  # of each argument that needs one
    return tuple(need and _runs(next(nodes)) for need in ctx.needs_input_grad)


def _runs(node: Node) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what `autograd.grad` wants of a leaf cannot be asked for
        return True


def unseen() -> contextlib.AbstractContextManager[None]:
    """Hide operations within the block from dispatch modes (a rehearsal, a profiler): no step runs them."""
    hidden: contextlib.AbstractContextManager[None] = _disable_current_modes()
    return hidden

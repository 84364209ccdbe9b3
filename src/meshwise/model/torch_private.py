"""Names from torch's private modules for dispatch modes and for the state of a running backward."""

import contextlib
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode", "in_backward", "needed_gradients", "without_modes"]


def in_backward() -> bool:
    """Return whether autograd is running a backward in this thread, which may repeat a part of a forward."""
    return torch._C._current_graph_task_id() != -1


def needed_gradients(ctx: Any) -> tuple[bool, ...]:
    """Return whether the running backward asks an autograd function for the gradient of each argument.

    In one part of a split backward it does not ask for all that `needs_input_grad` names.
    """
    nodes = (node for node, _ in ctx.next_functions if node is not None)  # of each argument that needs one
    return tuple(need and _runs(next(nodes)) for need in ctx.needs_input_grad)


def _runs(node: Node) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch does not answer for a leaf of `autograd.grad`
        return True


def without_modes() -> contextlib.AbstractContextManager[None]:
    """Hide operations within the block from dispatch modes: they are not part of the model's step."""
    hidden: contextlib.AbstractContextManager[None] = _disable_current_modes()
    return hidden

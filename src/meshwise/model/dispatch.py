"""Watching torch's operations, and not being watched: torch documents how, and keeps the names in a private module."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode", "asked_for", "in_backward", "unseen"]


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread, which may repeat a part of a forward."""
    return torch._C._current_graph_task_id() != -1


def asked_for(needs: Sequence[bool], nodes: Sequence[tuple[Node | None, int]]) -> tuple[bool, ...]:
    """Which gradients an autograd function of ours is asked for by the backward that runs, of those that it `needs`: of
    a backward in parts not all. `nodes`: the next functions, of its tensors, which come before all else.

    torch leaves that out for its own nodes; theirs, for everybody's, is private.
    """
    return tuple(need and (node is None or _runs(node)) for need, (node, _) in zip(needs, nodes, strict=False))


def _runs(node: Node) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # what `autograd.grad` wants of a leaf cannot be asked for
        return True


def unseen() -> contextlib.AbstractContextManager[None]:
    """Inside, whoever watches operations (a rehearsal, a profiler) is told of none: no step does them."""
    hidden: contextlib.AbstractContextManager[None] = _disable_current_modes()
    return hidden

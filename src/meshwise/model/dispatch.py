"""Watching torch's operations, and not being watched: torch documents how, and keeps the names in a private module."""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode", "in_backward", "unseen"]


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread, which may repeat a part of a forward."""
    return torch._C._current_graph_task_id() != -1


def unseen() -> contextlib.AbstractContextManager[None]:
    """Inside, whoever watches operations (a rehearsal, a profiler) is told of none: no step does them."""
    hidden: contextlib.AbstractContextManager[None] = _disable_current_modes()
    return hidden

"""Copies and sums of a rank that computes with one thread, made by what makes them soonest.

torch divides its loops among a rank's threads. Where one thread computes, the C library copies faster: beyond the
caches it does not read what it overwrites. numpy adds blocks that lie in a cache faster, to the same bits. Which NaN a
sum of several has they do not agree on, nor does either with itself in blocks of other sizes. docs/benchmarks.md has
the figures.
"""

from __future__ import annotations

from ctypes import memmove
from typing import Any, TypeAlias

import torch
from torch import Tensor

Elements: TypeAlias = Any
"""A tensor, or an array of numpy's of the same memory: both are cut and added alike. A sum's are all of one kind."""

_ADDED = (torch.float32, torch.float64)


def copy(x: Tensor, *, into: Tensor) -> None:
    """Copy a flat tensor into another one of its size and dtype."""
    if x.is_cpu and into.is_cpu and torch.get_num_threads() == 1:
        memmove(into.data_ptr(), x.data_ptr(), x.nbytes)
    else:
        into.copy_(x)


def elements(x: Tensor, *, op: str) -> Elements:
    """Return a flat tensor of the CPU as what adds it up, or finds the extremes, soonest."""
    return x.numpy() if op == "sum" and x.dtype in _ADDED and torch.get_num_threads() == 1 else x

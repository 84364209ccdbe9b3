"""What a training has freed once it has its shape, and no allocation will fill again.

The model's own memory, whose values the buckets have taken, goes in the midst of what stays; then the first step lays
out the optimizer's state among the activations of that step. Between them are holes that later activations do not fit
into: the allocator keeps them, and they count in every peak from then on. The ranks of a GPT of 34 million parameters
have 20 to 50 MB of them. Once, after the first step, they are given back to the system, which costs some milliseconds.
"""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Give memory that the C library holds free back to the system (glibc; others do it by themselves, or cannot)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

"""Lend buffers for data in transit.

A fresh buffer of some megabytes comes from the operating system page by page, each zeroed when first touched. For a
received part that costs about as much as adding it. So buffers are used again, and there are never more of them than
were once in use together.
"""

import threading

import torch
from torch import Tensor


class ScratchMemory:
    """CPU buffers to borrow and give back, from any thread."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def borrow(self, *, like: Tensor) -> Tensor:
        """Return a tensor of that size and dtype with unspecified contents."""
        size = like.numel() * like.element_size()
        if size == 0:
            return torch.empty_like(like)
        with self._lock:
            fitting = [buffer for buffer in self._free if buffer.numel() >= size]
            buffer = min(fitting or self._free, key=Tensor.numel, default=None)
            self._free = [kept for kept in self._free if kept is not buffer]
            if buffer is None or buffer.numel() < size:
                with torch.inference_mode(mode=False):  # or nobody could write to it outside of that
                    buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._lent[buffer.data_ptr()] = buffer
        return buffer[:size].view(like.dtype)

    def give_back(self, tensor: Tensor) -> None:
        """Give back a tensor of `borrow`, which must not be used any more."""
        if tensor.numel():
            with self._lock:
                self._free.append(self._lent.pop(tensor.data_ptr()))

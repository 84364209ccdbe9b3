"""Lend reusable private CPU buffers to collectives, for received parts and intermediate sums.

The operating system zeroes every page of a new buffer when it is first touched. For a received part this costs about
as much as adding the part. So buffers are reused. Their number is the largest number that was in use at one time."""

import threading

import torch
from torch import Tensor


class PrivateBuffers:
    """Pool of CPU buffers in private memory, which any thread may borrow from and give back to."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def borrow(self, *, like: Tensor) -> Tensor:
        """Return an uninitialized 1-D tensor with the number of elements and the dtype of `like`."""
        size = like.numel() * like.element_size()
        if size == 0:
            return torch.empty_like(like)
        with self._lock:
            fitting = [buffer for buffer in self._free if buffer.numel() >= size]
            buffer = min(fitting or self._free, key=Tensor.numel, default=None)
            self._free = [kept for kept in self._free if kept is not buffer]
            if buffer is None or buffer.numel() < size:
                with torch.inference_mode(mode=False):  # an inference tensor could not be written to outside the mode
                    buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._lent[buffer.data_ptr()] = buffer
        return buffer[:size].view(like.dtype)

    def give_back(self, tensor: Tensor) -> None:
        """Give back a tensor that `borrow` returned; the caller must not use it any more."""
        if tensor.numel():
            with self._lock:
                self._free.append(self._lent.pop(tensor.data_ptr()))

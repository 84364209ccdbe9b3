"""A file for tensors without values: what a rehearsal of a plan puts to rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from meshwise.memory.swap import Moved, Transfer


class RehearsedFile:
    """Takes what a `SwapFile` takes, as tensors on the meta device, and moves nothing."""

    direct = True

    def __init__(self) -> None:
        self.size = 0
        self.moved: deque[Moved] = deque(maxlen=0)
        self.tensors: list[Tensor] = []

    def allocate(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """A tensor in one dim."""
        self.tensors.append(torch.empty(numel, dtype=dtype, device="meta"))
        self.size += numel * dtype.itemsize
        return self.tensors[-1]

    def locate(self, tensor: Tensor) -> int | None:
        """0 for a tensor that was allocated here, or a view of one; None for others."""
        storage = tensor.untyped_storage()._cdata
        return 0 if any(own.untyped_storage()._cdata == storage for own in self.tensors) else None

    def place(self, tensor: Tensor) -> int:
        """The same for one that was."""
        offset = self.locate(tensor)
        assert offset is not None
        return offset

    def read(self, _offset: int, *, into: Tensor) -> Transfer:  # noqa: ARG002
        """There is nothing to read."""
        return Transfer([])

    def write(self, _offset: int, *, values: Tensor) -> Transfer:  # noqa: ARG002
        """There is nothing to write."""
        return Transfer([])

    def later(self, call: Callable[[], object]) -> None:
        """Now."""
        call()

    def close(self) -> None:
        """There is nothing to give back."""

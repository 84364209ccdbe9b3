"""Movers of a rehearsal: tensors without values move to a file that holds none, or to no place."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import torch
from torch import Tensor

from meshwise.memory.parked_storage import ActivationTransfers, ParkedStorage, StorageMover
from meshwise.memory.swap_file import BLOCK, MovedChunk, SwapTransfer


class _Slow(Future[None]):
    """A write that ends when it is waited for, and not before."""

    def result(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """End it."""
        with suppress(InvalidStateError):  # it has ended
            self.set_result(None)


class RehearsedFile:
    """Takes what a `SwapFile` takes, as tensors on the meta device, and moves nothing.

    The disk counts as slow: written data stays in its buffer until the buffer is needed. So as many buffers are made as
    a step may ever need.
    """

    direct = True

    def __init__(self) -> None:
        self.size = 0
        self.moved: deque[MovedChunk] = deque(maxlen=0)
        self.tensors: list[Tensor] = []
        self._writes: deque[_Slow] = deque()

    def allocate(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return a tensor in one dim."""
        self.tensors.append(torch.empty(numel, dtype=dtype, device="meta"))
        self.size += numel * dtype.itemsize
        return self.tensors[-1]

    def locate(self, tensor: Tensor) -> int | None:
        """0 for a tensor that was allocated here, or a view of one; None for others."""
        storage = tensor.untyped_storage()._cdata
        return 0 if any(own.untyped_storage()._cdata == storage for own in self.tensors) else None

    def place(self, tensor: Tensor) -> int:
        """Return the same for one that was."""
        offset = self.locate(tensor)
        assert offset is not None
        return offset

    def read(self, _offset: int, *, into: Tensor) -> SwapTransfer:  # noqa: ARG002
        """There is nothing to read."""
        return SwapTransfer([])

    def write(self, _offset: int, *, values: Tensor) -> SwapTransfer:  # noqa: ARG002
        """There is nothing to write, but it takes its time."""
        self._writes.append(_Slow())
        return SwapTransfer([self._writes[-1]])

    def hurry(self) -> bool:
        """End the write that was begun first; False when none is under way."""
        while self._writes:
            write = self._writes.popleft()
            if not write.done():
                write.result()
                return True
        return False

    def later(self, call: Callable[[], object]) -> None:
        """Call `call` at once."""
        call()

    def close(self) -> None:
        """There is nothing to give back."""


class RehearsedMover(StorageMover):
    """Counts what would be away. The disk is taken to be slow: what is on its way fills the buffers that there are."""

    def __init__(self, how: ActivationTransfers) -> None:
        self.device = torch.device("meta")
        self.told: Callable[[Tensor], None] = lambda _: None
        """Is shown each buffer when it is made."""
        self._most = how.staged
        self._buffers: list[Tensor] = []
        self._used = 0

    @property
    def staged(self) -> int:
        """Bytes of buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def park(self, values: Tensor, *, before: ParkedStorage | None) -> ParkedStorage:
        """Count a storage, in whole blocks."""
        size = -(-values.numel() // BLOCK) * BLOCK
        self._used += size
        self.peak = max(self.peak, self._used)
        if self.staged < self.peak and (not self._buffers or self.staged + size <= self._most):
            self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            self.told(self._buffers[-1])
        return _Nowhere(self, size, before)

    def close(self) -> None:
        """There is nothing to give back."""

    def leave(self, size: int) -> None:
        """Count a storage as back on the device, or not needed."""
        self._used -= size


class _Nowhere(ParkedStorage):
    def __init__(self, tier: RehearsedMover, size: int, before: ParkedStorage | None) -> None:
        super().__init__(size, before=before)
        self._tier = tier
        self._back: Tensor | None = None

    def start(self) -> None:
        if self._back is None:
            self._back = torch.empty(self.size, dtype=torch.uint8, device=self._tier.device)

    def get(self) -> Tensor:
        self.start()
        assert self._back is not None
        return self._back

    def __del__(self) -> None:
        self._tier.leave(self.size)

"""Stand-ins for the swap file and the storage movers in a rehearsal, in which tensors have no values."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from meshwise.memory.storage_movers import ActivationTransfers, ParkedStorage, StorageMover
from meshwise.memory.swap_file import SwapTransfer, TierActivity, whole_blocks


class RehearsedFile:
    """Stand-in for a `SwapFile`: its tensors are on the meta device, and nothing is read or written."""

    def __init__(self) -> None:
        self.moved: deque[TierActivity] = deque(maxlen=0)
        self.tensors: list[Tensor] = []

    def allocate(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return a meta tensor in one dim."""
        self.tensors.append(torch.empty(numel, dtype=dtype, device="meta"))
        return self.tensors[-1]

    def locate(self, tensor: Tensor) -> int | None:
        """Return 0 for a tensor allocated here or a view of it, and None for any other tensor."""
        storage = tensor.untyped_storage()._cdata
        return 0 if any(own.untyped_storage()._cdata == storage for own in self.tensors) else None

    def place(self, tensor: Tensor) -> int:
        """Return 0 for a tensor that was allocated here."""
        assert self.locate(tensor) is not None
        return 0

    def read(self, _offset: int, *, into: Tensor) -> SwapTransfer:  # noqa: ARG002
        """Return a transfer that has ended."""
        return SwapTransfer([])

    def write(self, _offset: int, *, values: Tensor, after: Callable[[], None] = lambda: None) -> SwapTransfer:  # noqa: ARG002
        """Return a transfer that has ended."""
        return SwapTransfer([])

    def later(self, call: Callable[[], object]) -> None:
        """Call `call` at once."""
        call()

    def close(self) -> None:
        """Do nothing: there is no file."""


class RehearsedMover(StorageMover):
    """Stand-in for a `DiskMover` that only counts bytes, as if the disk were slow and all buffers were full."""

    def __init__(self, transfers: ActivationTransfers) -> None:
        self.device = torch.device("meta")
        self.on_new_buffer: Callable[[Tensor], None] = lambda _: None
        """Called with each buffer when the buffer is made."""
        self._most = transfers.staged
        self._buffers: list[Tensor] = []

    @property
    def staged(self) -> int:
        """Bytes of all buffers that writes to the disk would fill."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def park(self, values: Tensor, *, before: ParkedStorage | None) -> ParkedStorage:
        """Count a storage in whole blocks of the file; make a buffer if a slow disk would need one more."""
        size = whole_blocks(values.numel())
        self.count(size)
        if self.staged < self.peak and (not self._buffers or self.staged + size <= self._most):
            self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self.device))
            self.on_new_buffer(self._buffers[-1])
        return _CountedStorage(self, size, before)

    def close(self) -> None:
        """Do nothing: there is no memory and no file."""


class _CountedStorage(ParkedStorage):
    def __init__(self, mover: RehearsedMover, size: int, before: ParkedStorage | None) -> None:
        super().__init__(size, before=before)
        self._mover = mover
        self._back: Tensor | None = None

    def start(self) -> None:
        if self._back is None:
            self._back = torch.empty(self.size, dtype=torch.uint8, device=self._mover.device)

    def get(self) -> Tensor:
        self.start()
        assert self._back is not None
        return self._back

    def __del__(self) -> None:
        self._mover.count(-self.size)

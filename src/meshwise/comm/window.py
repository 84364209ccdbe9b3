"""Parts of other ranks' memory, open to be read where they lie.

A reduction that first receives every part whole holds as much memory again as it reduces, writes it and reads it back.
Through windows it reads a block of every part, adds them up in the cache, and goes on to the next block.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshwise.comm.direct import Memory
from meshwise.comm.lost import lost
from meshwise.comm.reduction import reduce_in_order

_TAG_BITS = 0x7FFFFFFF
# Elements read at a time: enough to pay for a call into the kernel, few enough to be still in a cache when added.
_SHOWN = 128 << 10


def tag(label: str, *, tensor: Tensor) -> int:
    """The number by which a message is known: of what the rank believes it calls, the size and the dtype."""
    return zlib.crc32(f"{label} {tensor.numel()} {tensor.dtype}".encode()) & _TAG_BITS


class Window:
    """What another rank sends, to be read piece by piece straight from its memory, which waits until `close`."""

    def __init__(self, group: c10d.ProcessGroup, *, memory: Memory, peer: int, like: Tensor, label: str) -> None:
        self._group = group
        self._memory = memory
        self._like = like
        self._label = label
        self.peer = peer
        self.address = torch.empty(1, dtype=torch.int64)
        self._announced = group.recv([self.address], peer, tag(label, tensor=like))

    def open(self) -> None:
        """Wait until the sender has said where to look."""
        self._announced.wait()

    def read(self, start: int, *, into: Tensor) -> None:
        """Copy the elements from `start` on into a contiguous tensor. Raises OSError."""
        offset = start * self._like.element_size()
        self._memory.read(self.peer, address=int(self.address) + offset, into=into)

    def close(self) -> None:
        """Tell the sender that its memory is no longer needed."""
        taken = torch.ones(1, dtype=torch.uint8)
        self._group.send([taken], self.peer, tag(f"{self._label} taken", tensor=self._like)).wait()


def reduce_through(windows: Mapping[int, Window], *, own: Tensor, into: Tensor, op: str, about: object) -> None:
    """Reduce `own` with what opened windows, by group index, show: block by block, so that no part is held whole.

    `into` may be `own`. Closes the windows. Raises RankLostError, naming `about`.
    """
    here = next(index for index in range(len(windows) + 1) if index not in windows)
    blocks = {index: own.new_empty(min(_SHOWN, own.numel())) for index in windows}
    for start in range(0, own.numel(), _SHOWN):
        size = min(_SHOWN, own.numel() - start)
        for index, window in windows.items():
            try:
                window.read(start, into=blocks[index][:size])
            except OSError as error:
                raise lost(window.peer, about=about, error=error) from error
        shown = {index: block[:size] for index, block in blocks.items()}
        ordered = [shown.get(index, own[start : start + size]) for index in range(len(windows) + 1)]
        reduce_in_order(ordered, into=into[start : start + size], scratch=shown[1 if here == 0 else 0], op=op)
    for window in windows.values():
        try:
            window.close()
        except RuntimeError as error:
            raise lost(window.peer, about=about, error=error) from error

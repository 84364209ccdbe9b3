"""A part of another rank's tensor, and sums of such parts.

It lies in memory that this process maps, and is read and written like any tensor; or the system copies it from and to
the other process's own memory, a block at a time. A sum reads a block of every part, adds them while they are in the
cache, writes the result to every rank that wants it, and goes on to the next block: so a whole all-reduce reads each
tensor once and writes it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from meshwise.comm.direct import Memory
from meshwise.comm.reduction import reduce_in_order
from meshwise.comm.scratch import Scratch

# Bytes of a block: the parts of four ranks fit into the cache of a core. What the system copies should also pay for
# the call into it.
_NEAR_BYTES = 128 << 10
_FAR_BYTES = 512 << 10


@dataclass(frozen=True)
class Near:
    """Elements in memory that this process maps."""

    tensor: Tensor

    def cut(self, start: int, *, stop: int) -> Near:
        """The elements [start, stop)."""
        return Near(self.tensor[start:stop])

    def copy_to(self, into: Tensor) -> None:
        """Copy all of it."""
        into.copy_(self.tensor)

    def read(self, start: int, *, block: Tensor) -> Tensor:
        """The elements from `start` on, as many as `block` has; it need not be used."""
        return self.tensor[start : start + block.numel()]

    def write(self, start: int, *, block: Tensor) -> None:
        """Overwrite the elements from `start` on."""
        self.tensor[start : start + block.numel()].copy_(block)


@dataclass(frozen=True)
class Far:
    """Elements in another process's own memory."""

    memory: Memory
    rank: int
    address: int
    itemsize: int

    def cut(self, start: int, *, stop: int) -> Far:  # noqa: ARG002 - the reader knows how much it reads
        """The elements [start, stop)."""
        return replace(self, address=self.address + start * self.itemsize)

    def copy_to(self, into: Tensor) -> None:
        """Copy as much as `into` holds. Raises OSError."""
        self.memory.read(self.rank, address=self.address, into=into)

    def read(self, start: int, *, block: Tensor) -> Tensor:
        """The elements from `start` on, in `block`. Raises OSError."""
        self.memory.read(self.rank, address=self.address + start * self.itemsize, into=block)
        return block

    def write(self, start: int, *, block: Tensor) -> None:
        """Overwrite the elements from `start` on. Raises OSError."""
        self.memory.write(self.rank, address=self.address + start * self.itemsize, x=block)


Span: TypeAlias = Near | Far


def reduce_spans(spans: Sequence[Span], *, into: Tensor, copies: Sequence[Span], op: str, scratch: Scratch) -> None:
    """Reduce two or more spans in their order into `into`, which may be one of them, and copy the result to `copies`.

    Raises OSError when memory of another process cannot be read or written.
    """
    near = [span.tensor for span in spans if isinstance(span, Near)]
    if len(near) == len(spans) and not copies and into.numel() * into.element_size() <= _NEAR_BYTES:
        reduce_in_order(near, into=into, scratch=torch.empty_like(into), op=op)
        return
    far = any(isinstance(span, Far) for span in (*spans, *copies))
    step = max(1, (_FAR_BYTES if far else _NEAR_BYTES) // into.element_size())
    total = scratch.borrow(like=into[:step])
    blocks = [scratch.borrow(like=total) if isinstance(span, Far) else total for span in spans]
    for start in range(0, into.numel(), step):
        part = into[start : start + step]
        size = part.numel()
        shown = [span.read(start, block=block[:size]) for span, block in zip(spans, blocks, strict=True)]
        reduce_in_order(shown, into=part, scratch=total[:size], op=op)
        for copy in copies:
            copy.write(start, block=part)
    for block in (total, *(block for block in blocks if block is not total)):
        scratch.give_back(block)

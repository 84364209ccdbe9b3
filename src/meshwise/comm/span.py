"""A part of another rank's tensor, and sums of such parts.

It lies in memory that this process maps, and is read and written like any tensor; or the system copies it from and to
the other process's own memory, a block at a time. A sum reads a block of every part, adds them while they are in the
cache, writes the result to every rank that wants it, and goes on to the next block: so a whole all-reduce reads each
tensor once and writes it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from meshwise.comm.direct import Memory
from meshwise.comm.reduction import reduce_block
from meshwise.comm.scratch import Scratch

# Bytes of a block: it pays for its calls, and what a rank reads of four such stays in a cache of its own.
_BLOCK_BYTES = 256 << 10


class Near(NamedTuple):
    """Elements in memory that this process maps."""

    tensor: Tensor

    def cut(self, start: int, *, stop: int) -> Near:
        """The elements [start, stop)."""
        return Near(self.tensor[start:stop])

    def copy_to(self, into: Tensor) -> None:
        """Copy all of it."""
        into.copy_(self.tensor)

    def reader(self, blocks: int, *, block: Tensor) -> _Reader:  # noqa: ARG002 - nothing needs to be copied
        """What gives the blocks, as many as `chunk` cuts, each asked for by its number."""
        chunks: Sequence[Tensor] = self.tensor.chunk(blocks)
        return chunks.__getitem__

    def writer(self, blocks: int) -> _Writer:
        """What overwrites them."""
        chunks = self.tensor.chunk(blocks)
        return lambda number, x: chunks[number].copy_(x)


@dataclass(frozen=True)
class Far:
    """Elements in another process's own memory."""

    memory: Memory
    rank: int
    address: int
    numel: int
    itemsize: int

    def cut(self, start: int, *, stop: int) -> Far:
        """The elements [start, stop)."""
        return replace(self, address=self.address + start * self.itemsize, numel=stop - start)

    def copy_to(self, into: Tensor) -> None:
        """Copy all of it. Raises OSError."""
        self.memory.read(self.rank, address=self.address, into=into)

    def reader(self, blocks: int, *, block: Tensor) -> _Reader:
        """What gives the blocks in `block`, as many as `chunk` cuts. Calling it raises OSError."""
        step = -(-self.numel // blocks)

        def read(number: int) -> Tensor:
            into = block[: self.numel - number * step]
            self.memory.read(self.rank, address=self.address + number * step * self.itemsize, into=into)
            return into

        return read

    def writer(self, blocks: int) -> _Writer:
        """What overwrites them. Calling it raises OSError."""
        step = -(-self.numel // blocks)
        return lambda number, x: self.memory.write(self.rank, address=self.address + number * step * self.itemsize, x=x)


Span: TypeAlias = Near | Far
_Reader: TypeAlias = Callable[[int], Tensor]
_Writer: TypeAlias = Callable[[int, Tensor], object]


def reduce_spans(spans: Sequence[Span], *, into: Tensor, copies: Sequence[Span], op: str, scratch: Scratch) -> None:
    """Reduce two or more spans in their order into `into`, which may be one of them, and copy the result to `copies`.

    Raises OSError when memory of another process cannot be read or written.
    """
    blocks = max(1, -(-into.numel() * into.element_size() // _BLOCK_BYTES))
    near = [span.tensor for span in spans if isinstance(span, Near)]
    if blocks == 1 and len(near) == len(spans) and not copies:
        reduce_block(near, into=into, scratch=torch.empty_like(into) if len(near) > 2 else into, op=op)
        return
    parts = into.chunk(blocks)
    total = scratch.borrow(like=parts[0])
    borrowed = [scratch.borrow(like=total) if isinstance(span, Far) else total for span in spans]
    readers = [span.reader(blocks, block=block) for span, block in zip(spans, borrowed, strict=True)]
    writers = [copy.writer(blocks) for copy in copies]
    for number, part in enumerate(parts):
        shown = [read(number) for read in readers]
        reduce_block(shown, into=part, scratch=total[: part.numel()], op=op)
        for write in writers:
            write(number, part)
    for block in (total, *(block for block in borrowed if block is not total)):
        scratch.give_back(block)

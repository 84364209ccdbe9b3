"""Read parts of other ranks' tensors, and reduce them block by block.

Such a span lies in memory that this process maps, and is used like any tensor. Or the system copies it from and to the
other process's own memory, a block at a time. A sum reads a block of every part, adds them while they are in the cache,
writes the result to every rank that needs it, and continues with the next block. So an all-reduce reads each tensor
once and writes it once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from meshwise.comm.api.flat_parts import Elements, copy, elements, reduce_block
from meshwise.comm.shared_memory.process_memory import ProcessMemory
from meshwise.comm.shared_memory.scratch_memory import ScratchMemory

# Bytes of all ranks' blocks together, which fit the cache of a core; the least bytes of one block, for which its calls
# pay; and the alignment of a block, because aligned vectors are added faster.
_CACHED_BYTES, _LEAST_BYTES, _ALIGNED_BYTES = 512 << 10, 64 << 10, 4 << 10


class MappedSpan(NamedTuple):
    """Elements in memory that this process maps."""

    tensor: Tensor

    def cut(self, start: int, *, stop: int) -> "MappedSpan":
        """Return the elements [start, stop)."""
        return MappedSpan(self.tensor[start:stop])

    def copy_to(self, into: Tensor) -> None:
        """Copy all of it."""
        copy(self.tensor, into=into)

    def reader(self, step: int, *, block: Tensor, op: str) -> "_Reader":  # noqa: ARG002 - nothing needs to be copied
        """Return a function from a block number to a block of `step` elements."""
        whole = elements(self.tensor, op=op)
        return lambda number: whole[number * step : (number + 1) * step]

    def writer(self, step: int) -> "_Writer":
        """Return a function that overwrites blocks of `step` elements."""
        blocks = self.tensor.split(step)
        return lambda number, x: copy(x, into=blocks[number])


@dataclass(frozen=True)
class RemoteSpan:
    """Elements in another process's own memory."""

    memory: ProcessMemory
    rank: int
    address: int
    numel: int
    itemsize: int

    def cut(self, start: int, *, stop: int) -> "RemoteSpan":
        """Return the elements [start, stop)."""
        return replace(self, address=self.address + start * self.itemsize, numel=stop - start)

    def copy_to(self, into: Tensor) -> None:
        """Copy all of it. Raises OSError."""
        self.memory.read(self.rank, address=self.address, into=into)

    def reader(self, step: int, *, block: Tensor, op: str) -> "_Reader":
        """Return a function from a block number to that block of `step` elements, copied into `block`; it raises
        OSError. Calling it raises OSError.
        """

        def read(number: int) -> Elements:
            into = block[: self.numel - number * step]
            self.memory.read(self.rank, address=self.address + number * step * self.itemsize, into=into)
            return elements(into, op=op)

        return read

    def writer(self, step: int) -> "_Writer":
        """Return a function that overwrites blocks of `step` elements; it raises OSError. Calling it raises OSError."""
        return lambda number, x: self.memory.write(self.rank, address=self.address + number * step * self.itemsize, x=x)


Span: TypeAlias = MappedSpan | RemoteSpan
_Reader: TypeAlias = Callable[[int], Elements]
_Writer: TypeAlias = Callable[[int, Tensor], object]


def reduce_spans(
    spans: Sequence[Span], *, into: Tensor, copies: Sequence[Span], op: str, scratch: ScratchMemory
) -> None:
    """Reduce two or more spans in their order into `into`, which may be one of them, and copy the result to `copies`.

    Raises OSError when memory of another process cannot be read or written.
    """
    size = max(_LEAST_BYTES, _CACHED_BYTES // len(spans) // _ALIGNED_BYTES * _ALIGNED_BYTES)
    step = size // into.element_size()
    near = [span.tensor for span in spans if isinstance(span, MappedSpan)]
    if into.numel() <= step and len(near) == len(spans) and not copies:
        reduce_block(near, into=into, scratch=torch.empty_like(into) if len(near) > 2 else into, op=op)
        return
    parts = into.split(step)
    total = scratch.borrow(like=parts[0])
    borrowed = [scratch.borrow(like=total) if isinstance(span, RemoteSpan) else total for span in spans]
    readers = [span.reader(step, block=block, op=op) for span, block in zip(spans, borrowed, strict=True)]
    writers = [span.writer(step) for span in copies]
    sums = elements(total, op=op)
    with np.errstate(all="ignore"):  # as torch, which does not warn of an overflow
        for number, part in enumerate(parts):
            shown = [read(number) for read in readers]
            reduce_block(shown, into=elements(part, op=op), scratch=sums[: part.numel()], op=op)
            for write in writers:
                write(number, part)
    for block in (total, *(block for block in borrowed if block is not total)):
        scratch.give_back(block)

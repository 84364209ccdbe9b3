"""Reduce tensors of several ranks block by block, wherever each tensor is.

A span is a run of elements of one rank's tensor. A `MappedSpan` is in memory that this process maps, and is used like
any tensor. A `RemoteSpan` is in another process's private memory; the system copies to and from it. A sum is made block
by block: read the block of every span, add them in the cache, and write the result to every rank that needs it. So an
all-reduce reads each tensor once and writes it once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from meshwise.comm.api.flat_parts import Elements, copy, elements, reduce_block
from meshwise.comm.api.private_buffers import PrivateBuffers
from meshwise.comm.shared_memory.process_memory import ProcessMemory

# Bytes of the blocks of all ranks together, which fit the cache of a core. Least bytes of one block: a smaller one does
# not pay for its calls. Bytes at which blocks are aligned, because aligned vectors are added faster.
_CACHED_BYTES, _LEAST_BYTES, _ALIGNED_BYTES = 512 << 10, 64 << 10, 4 << 10


class MappedSpan(NamedTuple):
    """Elements of a rank's tensor, in memory that this process maps; `tensor` is 1-D."""

    tensor: Tensor

    def cut(self, start: int, *, stop: int) -> "MappedSpan":
        """Return the elements [start, stop)."""
        return MappedSpan(self.tensor[start:stop])

    def copy_to(self, into: Tensor) -> None:
        """Copy all elements into `into`."""
        copy(self.tensor, into=into)

    def reader(self, step: int, *, block: Tensor, op: str) -> "_Reader":  # noqa: ARG002 - nothing needs to be copied
        """Return a function from a block's number to a view of this block of `step` elements; `block` is not used."""
        whole = elements(self.tensor, op=op)
        return lambda number: whole[number * step : (number + 1) * step]

    def writer(self, step: int) -> "_Writer":
        """Return a function that overwrites the block with a given number; blocks have `step` elements."""
        blocks = self.tensor.split(step)
        return lambda number, x: copy(x, into=blocks[number])


@dataclass(frozen=True)
class RemoteSpan:
    """Elements of another rank's tensor, in the private memory of that rank's process."""

    memory: ProcessMemory
    rank: int
    address: int
    """Address of the first element in that process."""
    numel: int
    itemsize: int

    def cut(self, start: int, *, stop: int) -> "RemoteSpan":
        """Return the elements [start, stop)."""
        return replace(self, address=self.address + start * self.itemsize, numel=stop - start)

    def copy_to(self, into: Tensor) -> None:
        """Copy all elements into `into`. Raises OSError when the memory cannot be read."""
        self.memory.read(self.rank, address=self.address, into=into)

    def reader(self, step: int, *, block: Tensor, op: str) -> "_Reader":
        """Return a function from the number of a block of `step` elements to a copy of it, made in `block`. op: as in
        `elements`. The function raises OSError when the memory cannot be read."""

        def read(number: int) -> Elements:
            into = block[: self.numel - number * step]
            self.memory.read(self.rank, address=self.address + number * step * self.itemsize, into=into)
            return elements(into, op=op)

        return read

    def writer(self, step: int) -> "_Writer":
        """Return a function that overwrites the block of `step` elements with a given number; it may raise OSError."""
        return lambda number, x: self.memory.write(self.rank, address=self.address + number * step * self.itemsize, x=x)


Span: TypeAlias = MappedSpan | RemoteSpan
"""Elements of one rank's tensor, in mapped memory or in another process's memory."""

_Reader: TypeAlias = Callable[[int], Elements]
_Writer: TypeAlias = Callable[[int, Tensor], object]


def reduce_spans(
    spans: Sequence[Span], *, into: Tensor, copies: Sequence[Span], op: str, scratch: PrivateBuffers
) -> None:
    """Reduce two or more spans of equal size, in their order, into `into`, and copy the result to each of `copies`.
    `into` may be the tensor of one of the spans. op: sum, max or min. scratch: pool for intermediate blocks. Raises
    OSError when memory of another process cannot be read or written."""
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
    with np.errstate(all="ignore"):  # torch does not warn of an overflow either
        for number, part in enumerate(parts):
            shown = [read(number) for read in readers]
            reduce_block(shown, into=elements(part, op=op), scratch=sums[: part.numel()], op=op)
            for write in writers:
                write(number, part)
    for block in (total, *(block for block in borrowed if block is not total)):
        scratch.give_back(block)

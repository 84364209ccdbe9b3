"""Read rectangles of logical tensors from safetensors files, in whole blocks, and compare each block's checksum.

    wanted rectangles ∩ stored rectangles ──► spans of bytes, in the order of the files
                                                  │  join adjacent spans, in whole blocks, up to a window
                                                  ▼
         pread into the window ──► crc32 of every block ──► elements copied to their tensors

The window is the only buffer; data is copied a second time only if it is misaligned. Files of other programs have no
checksums to compare. Files are read with pread, because the system kills a process that reads past a truncated mmap."""

import itertools
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError
from meshwise.checkpoint.checkpoint_index import BLOCK, CheckpointFile
from meshwise.checkpoint.safetensors_format import TensorEntry
from meshwise.layout.layout import Rectangle

WINDOW_BYTES = 8 * BLOCK
"""Bytes of the buffer, and the most bytes that are read together."""
_SPAN = WINDOW_BYTES - 2 * BLOCK
"""Most bytes of a span. Such a span fits into the window even when its first and last block are read whole."""


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A safetensors file to read: its entries by name, and its expected size and checksums (None if it has none)."""

    path: Path
    expected: CheckpointFile | None
    entries: dict[str, TensorEntry]


@dataclass(frozen=True)
class ByteSpan:
    """A rectangle of an entry that is read in one piece: its bytes in the file, and the tensor to fill.

    | start, stop   bytes of the file from the first element to the end of the last; other elements may lie between
    | sizes         sizes of the rectangle
    | target        tensor of these sizes that the elements are copied to"""

    source: SourceFile
    start: int
    stop: int
    entry: TensorEntry
    sizes: tuple[int, ...]
    target: Tensor


def spans(source: SourceFile, *, entry: str, rectangle: Rectangle, target: Tensor) -> Iterator[ByteSpan]:
    """Yield spans that read `rectangle` of an entry into `target`; each span fits into the window.

    The rectangle's offsets count from the first element of the entry."""
    found = source.entries[entry]
    strides = _strides(found.shape)
    first = sum(map(int.__mul__, rectangle.offsets, strides))
    reach = sum((size - 1) * stride for size, stride in zip(rectangle.sizes, strides, strict=True))
    width = found.dtype.itemsize
    if (reach + 1) * width <= _SPAN:
        start = found.start + first * width
        yield ByteSpan(source, start, start + (reach + 1) * width, found, rectangle.sizes, target)
        return
    dim = next(dim for dim, size in enumerate(rectangle.sizes) if size > 1)
    below = reach - (rectangle.sizes[dim] - 1) * strides[dim]
    rows = max(1, (_SPAN // width - 1 - below) // strides[dim] + 1)
    for low in range(0, rectangle.sizes[dim], rows):
        high = min(low + rows, rectangle.sizes[dim])
        offsets = (*rectangle.offsets[:dim], rectangle.offsets[dim] + low, *rectangle.offsets[dim + 1 :])
        sizes = (*rectangle.sizes[:dim], high - low, *rectangle.sizes[dim + 1 :])
        part = target.narrow(dim, low, high - low)
        yield from spans(source, entry=entry, rectangle=Rectangle(offsets, sizes), target=part)


def read_spans(wanted: Iterable[ByteSpan]) -> None:
    """Copy the elements of all spans to their targets. Raises OSError, and DamageError for a wrong checksum."""
    buffer = torch.empty(WINDOW_BYTES, dtype=torch.uint8)
    ordered = sorted(wanted, key=lambda span: (span.source.path, span.start))
    for source, of_file in itertools.groupby(ordered, key=lambda span: span.source):
        with source.path.open("rb") as file:
            for start, stop, group in _windows(list(of_file), size=os.fstat(file.fileno()).st_size):
                read_blocks(source, descriptor=file.fileno(), start=start, into=buffer[: stop - start])
                for span in group:
                    data = buffer[span.start - start : span.stop - start]
                    if data.storage_offset() % span.entry.dtype.itemsize:
                        data = data.clone()
                    span.target.copy_(data.view(span.entry.dtype).as_strided(span.sizes, _strides(span.entry.shape)))


def read_blocks(source: SourceFile, *, descriptor: int, start: int, into: Tensor) -> None:
    """Fill `into` (bytes) from byte `start` of an open file. Compare each block with its checksum, if that is known.

    `start` is a multiple of `BLOCK`, and `into` ends where a block or the file ends. Without checksums
    (`source.expected` is None) bytes are not checked. Raises OSError, and DamageError for missing or altered bytes."""
    view = into.numpy().data
    position = 0
    while position < len(view):
        count = os.preadv(descriptor, [view[position:]], start + position)
        if not count:
            raise _damage(source, (start, start + len(view)), f"{start + len(view)} bytes", f"{start + position}")
        position += count
    if source.expected is None:
        return
    for low in range(0, len(view), BLOCK):
        number = (start + low) // BLOCK
        found, expected = zlib.crc32(view[low : low + BLOCK]), source.expected.checksums[number]
        if found != expected:
            at = (start + low, min(start + low + BLOCK, start + len(view)))
            raise _damage(source, at, f"the crc32 {expected:08x} of bytes {at[0]} to {at[1]}", f"{found:08x}")


def _damage(source: SourceFile, at: tuple[int, int], expected: str, found: str) -> DamageError:
    names = [entry.name for entry in source.entries.values() if entry.start < at[1] and entry.stop > at[0]]
    return DamageError([Damage(str(source.path), expected, found, tuple(names))])


def _windows(ordered: Sequence[ByteSpan], *, size: int) -> Iterator[tuple[int, int, list[ByteSpan]]]:
    """Yield (start, stop, spans) for each group of spans to read together: bytes `start` to `stop`, in whole blocks."""
    group: list[ByteSpan] = []
    start = stop = 0
    for span in ordered:
        end = min(size, -(-span.stop // BLOCK) * BLOCK)
        if group and (span.start > stop or max(stop, end) - start > WINDOW_BYTES):
            yield start, stop, group
            group = []
        if not group:
            start = stop = span.start // BLOCK * BLOCK
        group.append(span)
        stop = max(stop, end)
    if group:
        yield start, stop, group


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    return tuple(itertools.accumulate(reversed(shape[1:]), int.__mul__, initial=1))[::-1] if shape else ()

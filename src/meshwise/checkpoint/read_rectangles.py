"""Read rectangles of logical tensors from safetensors files: only the bytes needed, each block against its checksum.

    wanted rectangles ∩ stored parts ──► spans of bytes, in the order of the files
                                             │  neighbours together, in whole blocks, at most a window
                                             ▼
    pread ──► the window ──► crc32 of every block ──► copied to where they belong

The window is the only buffer. Files are read with pread, not mapped: truncating a mapped file kills the process.
"""

import itertools
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError
from meshwise.checkpoint.checkpoint_index import BLOCK, CheckpointFile
from meshwise.checkpoint.safetensors_format import TensorEntry
from meshwise.layout.rectangles import Rectangle

WINDOW_BYTES = 8 * BLOCK
_SPAN = WINDOW_BYTES - 2 * BLOCK
"""The most bytes between the first and the last element of a span: it fits a window wherever its first block begins."""


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A file to read: its size and checksums, if known, and the entries of its header."""

    path: Path
    expected: CheckpointFile | None
    entries: Mapping[str, TensorEntry]


@dataclass(frozen=True)
class ByteSpan:
    """Elements of an entry, within bytes `start` to `stop` of the file, and the tensor that they are copied to."""

    source: SourceFile
    start: int
    stop: int
    entry: TensorEntry
    sizes: tuple[int, ...]
    target: Tensor


def spans(source: SourceFile, *, entry: str, rectangle: Rectangle, target: Tensor) -> Iterator[ByteSpan]:
    """Yield the byte ranges to read for a rectangle of an entry (in the entry's coordinates) into `target`."""
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
    """Read all spans. Raises DamageError for bytes that are not as they were written, OSError."""
    buffer = torch.empty(WINDOW_BYTES, dtype=torch.uint8)
    ordered = sorted(wanted, key=lambda span: (span.source.path, span.start))
    for source, of_file in itertools.groupby(ordered, key=lambda span: span.source):
        with source.path.open("rb") as file:
            for start, stop, group in _windows(list(of_file), size=os.fstat(file.fileno()).st_size):
                read_verified(source, descriptor=file.fileno(), start=start, into=buffer[: stop - start])
                for span in group:
                    data = buffer[span.start - start : span.stop - start]
                    if data.storage_offset() % span.entry.dtype.itemsize:
                        data = data.clone()
                    span.target.copy_(data.view(span.entry.dtype).as_strided(span.sizes, _strides(span.entry.shape)))


def read_verified(source: SourceFile, *, descriptor: int, start: int, into: Tensor) -> None:
    """Read whole blocks of a file and compare them with their checksums. Raises DamageError, OSError."""
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
    """Yield neighbouring spans that are read together: their first byte and last, in whole blocks, and the spans."""
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

"""Rectangles: parts of a tensor, given by an offset and a size per dim.

A layout splits a tensor along its dims. ZeRO splits the row-major elements of a tensor at any element. Both kinds of
part are written as rectangles of the full tensor, so a checkpoint of one plan can be loaded under another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor: its first index (`offsets`) and its number of elements (`sizes`), per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the rectangle in the full tensor: `full[rectangle.slices]` is the part."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: "Rectangle") -> "Rectangle | None":
        """Return the intersection of two rectangles of one tensor; None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        sizes = tuple(min(a + m, b + n) - start for (a, m, b, n), start in zip(ends, starts, strict=True))
        return Rectangle(starts, sizes) if min(sizes, default=1) > 0 else None

    def seen_from(self, origin: Sequence[int]) -> "Rectangle":
        """Return the rectangle with its offsets relative to `origin`."""
        return Rectangle(tuple(start - zero for start, zero in zip(self.offsets, origin, strict=True)), self.sizes)


def rectangles(shape: Sequence[int], *, start: int, stop: int) -> list[Rectangle]:
    """Return rectangles that cover elements `start` to `stop` (excluded) of a row-major tensor, in their order.

    They are at most 2·ndim - 1. A matrix has up to three: the end of the first row, full rows, the start of the last.

        | shape (4, 5), elements 3 to 16        . . . a a
        |                                       b b b b b
        |                                       b b b b b
        |                                       c . . . .

    Raises ValueError if the range does not lie within the tensor."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"a tensor of shape {tuple(shape)} has no elements {start} to {stop}")
    if start == stop:
        return []
    if not shape:
        return [Rectangle((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    if first == last:
        return _within(first, rectangles(shape[1:], start=start % row, stop=stop % row))
    head = _within(first, rectangles(shape[1:], start=start % row, stop=row)) if start % row else []
    whole = first + bool(head)
    inner = (0,) * (len(shape) - 1)
    body = [Rectangle((whole, *inner), (last - whole, *shape[1:]))] if whole < last else []
    return head + body + _within(last, rectangles(shape[1:], start=0, stop=stop % row))


def _within(index: int, parts: list[Rectangle]) -> list[Rectangle]:
    """Return rectangles of row `index` as rectangles of the tensor that contains the row."""
    return [Rectangle((index, *part.offsets), (1, *part.sizes)) for part in parts]

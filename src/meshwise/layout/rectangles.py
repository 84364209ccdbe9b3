"""Parts of tensors as offsets and sizes.

Two kinds of cut meet in a split model. A layout cuts a tensor along its dims; a flat buffer shared out over ranks cuts
the row-major elements of a tensor at any element. A checkpoint, a norm and a conversion between plans need both in
one currency: rectangles of the full tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rectangle:
    """A part of a tensor: where it begins and how far it extends, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes it out of the full tensor: `full[rectangle.slices]`."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: "Rectangle") -> "Rectangle | None":
        """Return the common part of two rectangles of one tensor, or None."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        sizes = tuple(min(a + m, b + n) - start for (a, m, b, n), start in zip(ends, starts, strict=True))
        return Rectangle(starts, sizes) if min(sizes, default=1) > 0 else None

    def seen_from(self, origin: Sequence[int]) -> "Rectangle":
        """Return the same part with its offsets counted from `origin`."""
        return Rectangle(tuple(start - zero for start, zero in zip(self.offsets, origin, strict=True)), self.sizes)


def rectangles(shape: Sequence[int], *, start: int, stop: int) -> list[Rectangle]:
    """Return the elements `start` to `stop` (excluded) of a row-major tensor, as rectangles in the order of the
    elements.

    At most 2·ndim - 1 of them, so three for a matrix: the rest of a first row, whole rows, the beginning of a last row.

        | shape (4, 5), elements 3 to 16        . . . a a
        |                                       b b b b b
        |                                       b b b b b
        |                                       c . . . .

    Raises ValueError when the range does not lie within the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} of a tensor of shape {tuple(shape)}")
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
    """Rectangles of row `index`, as rectangles of the tensor that has this row."""
    return [Rectangle((index, *part.offsets), (1, *part.sizes)) for part in parts]

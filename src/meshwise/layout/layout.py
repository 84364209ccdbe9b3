"""Layouts: which part of a tensor, or of a sequence of tokens, each rank has.

A `Layout` says which mesh axes split which dim. The ranks along all other axes hold copies. This describes a tensor in
every scheme of tensor parallelism. So a scheme here is a table of layouts, not code that slices and communicates.

ZeRO cuts a tensor in row-major order, between any two elements. Checkpoints store the parts of layouts and of ZeRO as
rectangles of the full tensor (`rectangles`), so any other plan can load them.

`token_order` splits a sequence over ranks. `TokenRanges` holds the global positions of some tokens as ranges, so a few
numbers describe any length. Under a causal mask a token's work grows with its position. So the orders `zigzag` and
`striped` give each rank early and late tokens. docs/context.md has the tokens of each rank in every order."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh, even_split


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

    At most 2·ndim - 1 are needed. A matrix needs up to three: the end of the first row, full rows, a start of the last.

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


@dataclass(frozen=True)
class DimSplit:
    """Constraint on how a dim may be split.

    | sections   sizes of parts that are split separately, such as q, k and v of a fused projection; (): one part
    | grain      number of elements that stay on one rank, such as the features of an attention head

    Prints as `[64|64|64:16]`, or as "" if the dim may be split between any two elements."""

    sections: tuple[int, ...] = ()
    grain: int = 1

    def __str__(self) -> str:
        grain = f":{self.grain}" if self.grain > 1 else ""
        return f"[{'|'.join(map(str, self.sections))}{grain}]" if self.sections or grain else ""

    def spans(self, size: int, *, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return (start, stop) of one rank's part of each section of a dim of `size` elements.

        places: the rank's index along each axis that splits the dim, and the size of the axis, outermost axis first.

        Raises ValueError if the sections do not add up to `size`, or one is no multiple of the grain."""
        sections = self.sections or (size,)
        if sum(sections) != size or any(section % self.grain for section in sections):
            raise ValueError(f"a dim of {size} cannot be cut as '{self}': sections must total {size}, in whole grains")
        spans = list(itertools.pairwise([0, *itertools.accumulate(sections)]))
        for index, degree in places:
            cuts = [even_split((stop - start) // self.grain, degree)[index] for start, stop in spans]
            spans = [
                (start + low * self.grain, start + high * self.grain)
                for (start, _), (low, high) in zip(spans, cuts, strict=True)
            ]
        return spans


ANYWHERE = DimSplit()
"""No constraint: the dim may be split between any two elements."""


@dataclass(frozen=True)
class Layout:
    """Mesh axes that split the dims of a tensor. The ranks along all other axes hold copies.

    | splits    per dim, the axes that split it, outermost first; () leaves the dim whole
    | cuts      per dim, its constraint; (): every dim may be split between any two elements

    Prints as a short text:

        | dp,-          a matrix: dp splits its rows
        | row.dep,col   row, and within it dep, splits dim 0; col splits dim 1
        | tp[8|8:4],-   tp splits the first 8 rows, and separately the next 8; groups of 4 rows stay together
        | ()            a scalar

    Raises ValueError if an axis appears twice, more than one dim has sections, or `cuts` has the wrong length."""

    splits: tuple[tuple[str, ...], ...]
    cuts: tuple[DimSplit, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", self.cuts or (ANYWHERE,) * len(self.splits))
        if len(self.cuts) != len(self.splits):
            raise ValueError(f"{len(self.cuts)} cuts for {len(self.splits)} dims")
        if sum(bool(cut.sections) for cut in self.cuts) > 1:
            raise ValueError(f"two dims have sections in the layout '{self}'; only one dim may have sections")
        if repeated := sorted({axis for axis in self.axes if self.axes.count(axis) > 1}):
            raise ValueError(f"axis {' '.join(repeated)} appears twice in the layout '{self}'; name each axis once")

    @classmethod
    def replicated(cls, ndim: int) -> "Layout":
        """Return the layout of a tensor of `ndim` dims that every rank stores in full."""
        return cls(((),) * ndim)

    def __str__(self) -> str:
        words = [f"{'.'.join(axes) or '-'}{cut}" for axes, cut in zip(self.splits, self.cuts, strict=True)]
        return ",".join(words) or "()"

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that split the tensor, dim by dim."""
        return tuple(axis for axes in self.splits for axis in axes)

    def local(self, shape: Sequence[int], *, mesh: Mesh, rank: int) -> Rectangle:
        """Return the rectangle that `rank` stores of a tensor of full shape `shape`.

        Raises ValueError as `pieces` does, and if sections divide the part into several rectangles."""
        [part] = self.pieces(shape, mesh=mesh, rank=rank)
        return part

    def pieces(self, shape: Sequence[int], *, mesh: Mesh, rank: int) -> tuple[Rectangle, ...]:
        """Return the rectangles that `rank` stores of a tensor of full shape `shape`, one for each section.

        The rank stores them concatenated along `section_dim`. The grains of a dim are split evenly; if their number
        does not divide, the first parts have one grain more. If several axes split a dim, the second axis splits each
        part of the first axis. A part is empty if there are more ranks than grains.

        Raises ValueError if the number of dims differs, the mesh lacks an axis, or a dim does not fit `cuts`."""
        bounds = self._bounds(tuple(shape), mesh=mesh, rank=rank)
        return tuple(
            Rectangle(tuple(start for start, _ in corner), tuple(stop - start for start, stop in corner))
            for corner in itertools.product(*bounds)
        )

    def local_shape(self, shape: Sequence[int], *, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return the shape of the tensor that `rank` stores. Raises ValueError as `pieces` does."""
        bounds = self._bounds(tuple(shape), mesh=mesh, rank=rank)
        return tuple(sum(stop - start for start, stop in spans) for spans in bounds)

    @property
    def section_dim(self) -> int:
        """Dim that has sections, along which the rectangles of `pieces` are concatenated; 0 if no dim has sections."""
        return next((dim for dim, cut in enumerate(self.cuts) if cut.sections), 0)

    @lru_cache(4096)  # noqa: B019 - layouts and meshes are small values
    def _bounds(self, shape: tuple[int, ...], *, mesh: Mesh, rank: int) -> list[list[tuple[int, int]]]:
        """Return (start, stop) of the rank's part of each section, per dim."""
        if len(shape) != len(self.splits):
            raise ValueError(f"the layout '{self}' has {len(self.splits)} dims, the shape {tuple(shape)} {len(shape)}")
        return [
            cut.spans(size, places=[(mesh.index(rank, axis=a), mesh.degree(a)) for a in axes])
            for size, axes, cut in zip(shape, self.splits, self.cuts, strict=True)
        ]


@dataclass(frozen=True)
class TokenTile:
    """Neighbouring local tokens whose global positions are evenly spaced.

    | start, stop    indices of the tokens among the tokens of the rank
    | first, last    lowest and highest global position
    | step           distance between two neighbouring positions"""

    start: int
    stop: int
    first: int
    last: int
    step: int

    @property
    def positions(self) -> slice:
        """Global positions as a slice."""
        return slice(self.first, self.last + 1, self.step)

    def halves(self) -> list["TokenTile"]:
        """Return the first and the second half of the tokens; one tile for one token."""
        tokens = TokenRanges((range(self.first, self.last + 1, self.step),))
        return [
            replace(one, start=self.start + one.start, stop=self.start + one.stop)
            for one in tokens.tiles((tokens.count + 1) // 2)
        ]


@dataclass(frozen=True)
class TokenRanges:
    """Global positions of tokens, as ranges in the order in which a rank has them."""

    ranges: tuple[range, ...]

    @classmethod
    def whole(cls, length: int) -> "TokenRanges":
        """Return the positions of all tokens of a sequence."""
        return cls((range(length),))

    @classmethod
    def joined(cls, parts: Sequence["TokenRanges"]) -> "TokenRanges":
        """Return the positions of several ranks, in the order of `parts`."""
        return cls(tuple(one for part in parts for one in part.ranges))

    @cached_property
    def count(self) -> int:
        """Number of tokens."""
        return sum(map(len, self.ranges))

    def positions(self, *, device: torch.device | None = None) -> Tensor:
        """Return the positions as integers of shape (count,)."""
        return torch.cat([torch.arange(part.start, part.stop, part.step, device=device) for part in self.ranges])

    def take(self, x: Tensor, *, dim: int) -> Tensor:
        """Return the elements of `x` at these positions along `dim`."""
        index: list[slice] = [slice(None)] * (dim % x.dim())
        parts = [x[(*index, slice(part.start, part.stop, part.step))] for part in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def narrow(self, start: int, *, stop: int) -> "TokenRanges":
        """Return the positions of the local tokens `start` to `stop` (excluded)."""
        firsts = itertools.accumulate(map(len, self.ranges), initial=0)
        places = zip(self.ranges, firsts, strict=False)
        return TokenRanges(tuple(part[max(0, start - first) : max(0, stop - first)] for part, first in places))

    def below(self, position: int) -> "TokenRanges":
        """Return the positions below `position`."""
        return TokenRanges(tuple(part[: len(range(part.start, position, part.step))] for part in self.ranges))

    def tiles(self, size: int) -> Iterator[TokenTile]:
        """Yield the tokens as tiles of at most `size` tokens, none across the border of two ranges."""
        passed = 0
        for part in self.ranges:
            for low in range(0, len(part), size):
                tile = part[low : low + size]
                yield TokenTile(passed + low, passed + low + len(tile), tile[0], tile[-1], tile.step)
            passed += len(part)


def token_order(order: str, *, length: int, parts: int) -> tuple[TokenRanges, ...]:
    """Return the positions of each of `parts` ranks for a sequence of `length` tokens; some may have none."""
    if order == "contiguous":
        return tuple(TokenRanges((range(start, stop),)) for start, stop in even_split(length, parts))
    if order == "zigzag":
        blocks = [range(*block) for block in even_split(length, 2 * parts)]
        return tuple(TokenRanges(pair) for pair in zip(blocks[:parts], blocks[: parts - 1 : -1], strict=True))
    return tuple(TokenRanges((range(index, max(index, length), parts),)) for index in range(parts))

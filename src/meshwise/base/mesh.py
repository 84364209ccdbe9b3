"""Named axes over ranks (`Mesh`), and splits of a number of elements (`even_split`, `weighted_split`).

Every kind of parallelism splits something over a group of ranks, and every group is computed from one immutable `Mesh`.
The coordinate of a rank has one index per axis: the digits of the rank number, where the degree of an axis is
the base of its digit. The ranks of a group differ only in the indices of the group's axes.

    Mesh.of(pp=2, dp=2, tp=2)       the last axis varies fastest

    pp=0                pp=1
      tp │ 0  1           tp │ 0  1       rank 6 has the coordinate pp=1 dp=1 tp=0
    dp 0 │ 0  1         dp 0 │ 4  5       group(6, axes=["tp"])        6 7
    dp 1 │ 2  3         dp 1 │ 6  7       group(6, axes=["pp", "tp"])  2 3 6 7

A *joint axis* is one name for several axes together, and may be named wherever an axis may. Under `dp=4 ep=2` the mesh
has the axes `dp_outer` and `dp_ep`; `dp` joins both of them, and `ep` is another name of `dp_ep`:

    Mesh((("dp_outer", 2), ("dp_ep", 2)), joint=(("dp", ("dp_outer", "dp_ep")), ("ep", ("dp_ep",))))"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

_WIDEST_GRID = 12
_TALLEST_GRID = 6
_MOST_GRIDS = 3
_Item = TypeVar("_Item")


class MeshGrid(NamedTuple):
    """Cells of a drawing of ranks; `…` replaces rows and columns that do not fit on a screen.

    | title   coordinate along the outer axes; "" without outer axes
    | head    name of the axis across, then its indices; empty without such an axis
    | rows    for each row, its label, then its ranks"""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Mesh:
    """Named axes with their degrees, outermost first; the last axis varies fastest over the ranks.

    `joint`: (name, axes) of each joint axis; it may join no axes.

    Prints as `dp=2 tp=2`. Raises ValueError for a repeated axis, a name that is no identifier, and a degree below 1."""

    axes: tuple[tuple[str, int], ...]
    joint: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        for name, degree in self.axes:
            if not name.isidentifier():
                raise ValueError(f"{name!r} cannot name an axis: use letters, digits and _, as in 'dp'")
            if type(degree) is not int or degree < 1:
                raise ValueError(f"axis {name} has degree {degree!r}; a degree is a whole number, at least 1")
        if repeated := {name for name in self.names if self.names.count(name) > 1}:
            raise ValueError(f"axis {' '.join(sorted(repeated))} is named twice in the mesh {self}")

    @classmethod
    def of(cls, **degrees: int) -> "Mesh":
        """Return the mesh with these axes, outermost first: `Mesh.of(dp=2, tp=2)`."""
        return cls(tuple(degrees.items()))

    def __str__(self) -> str:
        return " ".join(f"{name}={degree}" for name, degree in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks: the product of the degrees."""
        return math.prod(degree for _, degree in self.axes)

    def degree(self, axis: str) -> int:
        """Return the number of ranks along `axis`. Raises ValueError when the mesh has no such axis."""
        degrees = dict(self.axes)
        return degrees[axis] if axis in degrees else math.prod(degrees[name] for name in self.expand([axis]))

    def expand(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes with each joint axis replaced by its axes, in the order of the mesh.

        Raises ValueError for a name that the mesh does not have."""
        joint, wanted = dict(self.joint), set()
        for name in axes:
            if name not in joint and name not in self.names:
                raise ValueError(f"no axis {name} in the mesh '{self}'; its axes are {' '.join((*self.names, *joint))}")
            wanted |= set(joint.get(name, (name,)))
        return tuple(name for name in self.names if name in wanted)

    def others(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes of the mesh that `axes` do not name, in the order of the mesh."""
        named = self.expand(axes)
        return tuple(name for name in self.names if name not in named)

    @lru_cache(4096)  # noqa: B019 - every collective and every part of a tensor asks for it
    def index(self, rank: int, *, axis: str) -> int:
        """Return the index of `rank` along `axis`; along a joint axis, its place among the ranks of that axis."""
        coordinate, index = self.coordinate(rank), 0
        for name in self.expand([axis]):
            index = index * self.degree(name) + coordinate[name]
        return index

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank`: one index per axis. Raises ValueError when the mesh has no such rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"no rank {rank} in the mesh {self}: its ranks are 0 to {self.size - 1}")
        return dict(zip(self.names, map(int, np.unravel_index(rank, self._shape)), strict=True))

    def group(self, rank: int, *, axes: Sequence[str]) -> tuple[int, ...]:
        """Return `rank` and all ranks whose coordinates differ from it only along `axes`, in ascending order.

        Every rank of it gets the same tuple, for any order of `axes`. Raises ValueError for an unknown axis or rank."""
        axes = self.expand(axes)
        index = tuple(slice(None) if name in axes else place for name, place in self.coordinate(rank).items())
        return tuple(np.arange(self.size).reshape(self._shape)[index].flatten().tolist())

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return all groups along `axes`, in the order of their first ranks. Every rank is in exactly one group.

        Raises ValueError for an unknown axis."""
        axes = self.expand(axes)
        order = [self.names.index(name) for name in (*self.others(axes), *axes)]
        ranks = np.arange(self.size).reshape(self._shape).transpose(order)
        return tuple(map(tuple, ranks.reshape(-1, math.prod(map(self.degree, axes))).tolist()))

    def grids(self) -> Iterator[MeshGrid]:
        """Yield a grid of the two innermost axes for each coordinate of the outer axes, without axes of degree 1."""
        names = [name for name, degree in self.axes if degree > 1]
        outer, down, across = names[:-2], names[-2:-1], names[-1:]
        width = math.prod(map(self.degree, across))
        head = _elide([*across, *map(str, range(width))], _WIDEST_GRID + 1, "…") if across else []
        for ranks in self.groups(names[-2:]):
            coordinate = self.coordinate(ranks[0])
            lines = [list(map(str, ranks[start : start + width])) for start in range(0, len(ranks), width)]
            labels = [f"{down[0]} {index}" for index in range(len(lines))] if down else ["rank"]
            rows = [_elide([label, *line], _WIDEST_GRID + 1, "…") for label, line in zip(labels, lines, strict=True)]
            title = " ".join(f"{name}={coordinate[name]}" for name in outer)
            yield MeshGrid(title, head, _elide(rows, _TALLEST_GRID, ["…"]))

    def picture(self) -> str:
        """Return a text drawing of the first three `grids`."""
        grids, lines = list(self.grids()), list[str]()
        for grid in grids[:_MOST_GRIDS]:
            table = [grid.head] * bool(grid.head) + grid.rows
            left, width = max(len(line[0]) for line in table), len(str(self.size - 1))
            lines += [grid.title] * bool(grid.title)
            lines += [
                f"{label:>{left}} │ {'  '.join(f'{cell:>{width}}' for cell in cells)}".rstrip()
                for label, *cells in table
            ]
        if len(grids) > _MOST_GRIDS:
            lines.append(f"… {len(grids) - _MOST_GRIDS} more, to rank {self.size - 1}")
        return "\n".join(lines)

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(degree for _, degree in self.axes)


def even_split(size: int, parts: int) -> list[tuple[int, int]]:
    """Return (start, stop) of `parts` contiguous parts of `size` elements; the first parts may be larger by one.

    With more parts than elements, the last parts are empty. Raises ValueError for a negative size or no parts."""
    if size < 0 or parts < 1:
        raise ValueError(f"cannot split {size} into {parts} parts; needs a size of at least 0 and at least one part")
    small, larger = divmod(size, parts)
    starts = [index * small + min(index, larger) for index in range(parts + 1)]
    return list(itertools.pairwise(starts))


def weighted_split(size: int, *, weights: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of contiguous parts of `size` elements, about proportional to the positive `weights`.

    If the weights add up to `size`, they are the sizes. A part is empty only if there are fewer elements than parts."""
    least, total, ends = int(size >= len(weights)), sum(weights), [0]
    for number, before in enumerate(itertools.accumulate(weights), start=1):
        nearest = (2 * size * before + total) // (2 * total)
        ends.append(min(max(nearest, ends[-1] + least), size - least * (len(weights) - number)))
    return list(itertools.pairwise(ends))


def _elide(items: list[_Item], limit: int, gap: _Item) -> list[_Item]:
    """Return all items if there are at most `limit`; otherwise the first `limit - 2`, then `gap`, then the last."""
    return items if len(items) <= limit else [*items[: limit - 2], gap, items[-1]]

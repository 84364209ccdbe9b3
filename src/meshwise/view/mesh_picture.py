"""Draw a mesh as a picture: a cell for each rank, in grids of the two innermost axes. Cells of a node have one colour.

    | pp 0                  pp 1
    |       tp 0  tp 1            tp 0  tp 1
    | dp 0 [  0 ][  1 ]     dp 0 [  4 ][  5 ]
    | dp 1 [  2 ][  3 ]     dp 1 [  6 ][  7 ]

The next two axes arrange the grids in rows and columns. A long axis is shown by its first indices and its last index.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwise.base.mesh import Mesh
from meshwise.view.shapes import Bars, Box, Picture, PictureText, Point, Shape, text_width

_MOST = (16, 8, 8, 4)
"""Largest number of shown indices per axis: across a grid, down a grid, grids in a row, rows of grids."""
_TONES = 6
_HIGH, _GAP, _TITLE, _LABEL, _LEAST = 24.0, 2.0, 26.0, 18.0, 40.0
_BREAK = 40.0
"""Width of the gap where grids are left out."""
_WIDEST, _LETTERS = 1180.0, 340.0
"""Largest and smallest width of the picture. The smallest has room for the title."""
_Index = int | None
"""Index of a rank along an axis; None for the indices that are left out."""


@dataclass(frozen=True)
class _Axis:
    """Axis with the indices that are shown; an axis without a name has one index."""

    name: str = ""
    indices: tuple[_Index, ...] = (0,)

    @classmethod
    def shown(cls, name: str, *, degree: int, most: int) -> "_Axis":
        """Return an axis that shows at most `most` indices."""
        return cls(name, tuple(range(degree)) if degree <= most else (*range(most - 2), None, degree - 1))

    def at(self, index: _Index) -> dict[str, _Index]:
        """Return the part of a coordinate that has this index; empty for an axis without a name."""
        return {self.name: index} if self.name else {}

    def label(self, index: _Index) -> str:
        """Return the name of an index."""
        return "…" if index is None else f"{self.name} {index}" if self.name else ""


def mesh_picture(mesh: Mesh, *, ranks_per_node: int = 0) -> Picture:
    """Return the picture of a mesh. Nodes have different colours, unless `ranks_per_node` is 0 (unknown)."""
    named = [(name, degree) for name, degree in reversed(mesh.axes) if degree > 1]
    axes = [_Axis.shown(name, degree=degree, most=most) for (name, degree), most in zip(named, _MOST, strict=False)]
    across, down, outer, below = [*axes, *[_Axis()] * (len(_MOST) - len(axes))]
    sheet = _Sheet(mesh, across, down, ranks_per_node)
    if outer.name:
        outer = _Axis.shown(outer.name, degree=mesh.degree(outer.name), most=max(3, int(_WIDEST / sheet.wide)))
    nodes = f", {ranks_per_node} to a node" if ranks_per_node else ""
    outermost = " ".join(name for name, _ in named[len(_MOST) :])  # shown by their first index only
    rest = f"; of {outermost} the first" if outermost else ""
    shapes: list[Shape] = [PictureText(f"{mesh.size} rank{'s' * (mesh.size > 1)}{nodes}{rest}", 0, 10, size=13)]
    right, y = _LETTERS, _TITLE
    for under in below.indices:
        x = 0.0
        for next_to in outer.indices:
            if None in (under, next_to):
                shapes.append(
                    PictureText("…", x + (sheet.left if under is None else 0), y + sheet.high / 2, "faint", 14)
                )
                x += sheet.wide if under is None else _BREAK
                continue
            heading = "  ".join(axis.label(index) for axis, index in ((below, under), (outer, next_to)) if axis.name)
            shapes += [PictureText(heading, x + sheet.left, y + _LABEL / 2, size=11)] if heading else []
            shapes += sheet.grid({**below.at(under), **outer.at(next_to)}, at=(x, y + _LABEL * bool(heading)))
            x += sheet.wide
        right, y = max(right, x), y + sheet.high + _LABEL * bool(outer.name)
    return Picture(str(mesh), right, y, tuple(shapes))


@dataclass(frozen=True)
class _Sheet:
    """Settings that all grids of a picture share."""

    mesh: Mesh
    across: _Axis
    down: _Axis
    ranks_per_node: int

    @property
    def cell(self) -> float:
        """Width of a cell."""
        return max(_LEAST, 12 + text_width(str(self.mesh.size - 1), size=11))

    @property
    def left(self) -> float:
        """Width of the labels of a grid."""
        return 14 + max(text_width(self.down.label(index), size=10) for index in self.down.indices[-1:])

    @property
    def wide(self) -> float:
        """Distance from a grid to the next one in a row."""
        return self.left + len(self.across.indices) * (self.cell + _GAP) + 22

    @property
    def high(self) -> float:
        """Height of a grid without its heading."""
        return _LABEL + len(self.down.indices) * (_HIGH + _GAP) + 14

    def grid(self, fixed: Mapping[str, _Index], *, at: Point) -> Iterator[Shape]:
        """Yield the shapes of the grid of ranks with the indices `fixed`, with its corner at the point `at`."""
        left, top = at[0] + self.left, at[1] + _LABEL
        boxes: dict[int, Box] = {}
        for i, along in enumerate(self.across.indices):
            x = left + i * (self.cell + _GAP)
            yield PictureText(self.across.label(along), x + self.cell / 2, top - 9, "faint", 10, "middle")
            for j, line in enumerate(self.down.indices):
                y = top + j * (_HIGH + _GAP)
                place = {**fixed, **self.down.at(line), **self.across.at(along)}
                known = {name: index for name, index in place.items() if index is not None}
                if len(known) == len(place):
                    boxes[self.mesh.rank(dict.fromkeys(self.mesh.names, 0) | known)] = x, y, self.cell, _HIGH
                else:
                    yield PictureText("…", x + self.cell / 2, y + _HIGH / 2, "faint", 11, "middle")
        for j, line in enumerate(self.down.indices):
            yield PictureText(self.down.label(line), left - 8, top + j * (_HIGH + _GAP) + _HIGH / 2, "faint", 10, "end")
        yield from self.cells(boxes)

    def cells(self, boxes: Mapping[int, Box]) -> Iterator[Shape]:
        """Yield a cell in the colour of its node for each rank, given the box of each rank."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for rank in boxes:
            nodes[rank // self.ranks_per_node if self.ranks_per_node else 0].append(rank)
        for node, ranks in nodes.items():
            where = f", node {node}" if self.ranks_per_node else ""
            names = []
            for rank in ranks:
                indices = self.mesh.coordinate(rank).items()
                place = " ".join(f"{name} {index}" for name, index in indices if self.mesh.degree(name) > 1)
                names.append(f"rank {rank}{place and f': {place}'}{where}")
            yield Bars(f"node-{node % _TONES}", tuple(boxes[rank] for rank in ranks), tuple(names))
        for rank, (x, y, width, height) in boxes.items():
            yield PictureText(str(rank), x + width / 2, y + height / 2, "ink", 11, "middle")

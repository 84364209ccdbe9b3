"""A mesh as a picture: a cell for every rank, a grid for the two innermost axes, grids beside and below one another for
the others; cells of one node in one colour.

    pp 0                  pp 1
          tp 0  tp 1            tp 0  tp 1
    dp 0 [  0 ][  1 ]     dp 0 [  4 ][  5 ]
    dp 1 [  2 ][  3 ]     dp 1 [  6 ][  7 ]

A long axis shows its first indices and its last one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwise.mesh import Mesh
from meshwise.view.picture import Bars, Box, Picture, Point, Shape, Text, text_width

_MOST = (16, 8, 8, 4)
"""Indices of an axis that are shown: across a grid, down, grids beside one another, below one another."""

_TONES = 6
_HIGH, _GAP, _TITLE, _LABEL, _LEAST = 24.0, 2.0, 26.0, 18.0, 40.0
_WIDEST, _LETTERS = 1180.0, 340.0
"""How wide the picture may be, and its title is."""

_Index = int | None
"""Of a rank along an axis; None stands for those that are left out."""


@dataclass(frozen=True)
class _Axis:
    """An axis, and which of its indices are shown; one without a name has a single one."""

    name: str = ""
    indices: tuple[_Index, ...] = (0,)

    @classmethod
    def shown(cls, name: str, *, degree: int, most: int) -> _Axis:
        """At most so many indices."""
        return cls(name, tuple(range(degree)) if degree <= most else (*range(most - 2), None, degree - 1))

    def at(self, index: _Index) -> dict[str, _Index]:
        """What it adds to a coordinate."""
        return {self.name: index} if self.name else {}

    def label(self, index: _Index) -> str:
        """The name of an index."""
        return "…" if index is None else f"{self.name} {index}" if self.name else ""


def mesh_picture(mesh: Mesh, *, ranks_per_node: int = 0) -> Picture:
    """The picture; nodes are told apart where it is known how many ranks one has."""
    named = [(name, degree) for name, degree in reversed(mesh.axes) if degree > 1]
    cell = max(_LEAST, 12 + text_width(str(mesh.size - 1), size=11))
    left = text_width(f"{named[1][0]} {named[1][1]}", size=10) + 14 if len(named) > 1 else 0.0
    most = list(_MOST)
    if named:
        wide = left + min(named[0][1], most[0]) * (cell + _GAP) + 22
        most[2] = max(3, min(most[2], int(_WIDEST / wide)))
    axes = [_Axis.shown(name, degree=degree, most=most) for (name, degree), most in zip(named, most, strict=False)]
    across, down, beside, below = [*axes, *[_Axis()] * (len(_MOST) - len(axes))]
    wide = left + len(across.indices) * (cell + _GAP) + 22
    high = _LABEL * (2 if beside.name else 1) + len(down.indices) * (_HIGH + _GAP) + 14
    shapes: list[Shape] = [
        Text(_title(mesh, ranks_per_node, [name for name, _ in named[len(_MOST) :]]), 0, 10, size=13)
    ]
    boxes: dict[int, Box] = {}
    for (row, under), (column, next_to) in itertools.product(enumerate(below.indices), enumerate(beside.indices)):
        x, y = left + column * wide, _TITLE + row * high
        if None in (under, next_to):
            shapes.append(Text("…", x, y + high / 2, "faint", 14))
            continue
        if beside.name:
            shapes.append(Text(f"{below.label(under)}  {beside.label(next_to)}".strip(), x, y + _LABEL / 2, size=11))
            y += _LABEL
        shapes += _labels(across, down, at=(x, y + _LABEL), cell=cell)
        for (i, along), (j, line) in itertools.product(enumerate(across.indices), enumerate(down.indices)):
            box = x + i * (cell + _GAP), y + _LABEL + j * (_HIGH + _GAP), cell, _HIGH
            place = {**below.at(under), **beside.at(next_to), **down.at(line), **across.at(along)}
            known = {name: index for name, index in place.items() if index is not None}
            if len(known) == len(place):
                boxes[mesh.rank(dict.fromkeys(mesh.names, 0) | known)] = box
            else:
                shapes.append(Text("…", box[0] + cell / 2, box[1] + _HIGH / 2, "faint", 11, "middle"))
    width = max(len(beside.indices) * wide, _LETTERS)
    return Picture(
        str(mesh), width, _TITLE + len(below.indices) * high, (*shapes, *_cells(mesh, boxes, ranks_per_node))
    )


def _labels(across: _Axis, down: _Axis, *, at: Point, cell: float) -> Iterator[Text]:
    """The indices above a grid, and those beside it."""
    x, y = at
    for i, index in enumerate(across.indices):
        yield Text(across.label(index), x + i * (cell + _GAP) + cell / 2, y - 9, "faint", 10, "middle")
    for j, index in enumerate(down.indices):
        yield Text(down.label(index), x - 8, y + j * (_HIGH + _GAP) + _HIGH / 2, "faint", 10, "end")


def _title(mesh: Mesh, ranks_per_node: int, outermost: Sequence[str]) -> str:
    nodes = f", {ranks_per_node} to a node" if ranks_per_node else ""
    rest = f"; of {' '.join(outermost)} the first" if outermost else ""
    return f"{mesh.size} rank{'s' * (mesh.size > 1)}{nodes}{rest}"


def _cells(mesh: Mesh, boxes: Mapping[int, Box], ranks_per_node: int) -> Iterator[Shape]:
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in boxes:
        nodes[rank // ranks_per_node if ranks_per_node else 0].append(rank)
    for node, ranks in nodes.items():
        where = f", node {node}" if ranks_per_node else ""
        names = tuple(f"rank {rank}{_place(mesh, rank)}{where}" for rank in ranks)
        yield Bars(f"node-{node % _TONES}", tuple(boxes[rank] for rank in ranks), names)
    for rank, (x, y, width, height) in boxes.items():
        yield Text(str(rank), x + width / 2, y + height / 2, "ink", 11, "middle")


def _place(mesh: Mesh, rank: int) -> str:
    """Its indices along the axes that have several."""
    indices = [f"{name} {index}" for name, index in mesh.coordinate(rank).items() if mesh.degree(name) > 1]
    return f": {' '.join(indices)}" if indices else ""

"""Draw the timeline, memory and mesh of plans as pictures (`pictures`), all plans to the same scale.

`timeline_picture` has a row for every rank, and time to the right; `memory_pictures` draws one area for each category
of memory, above one another. `mesh_picture` has a cell for each rank, in grids of the two innermost axes; cells of a
node have one colour: docs/view.md. The next two axes arrange the grids in rows and columns. A long axis is shown
by its first indices and its last index.
`picture_sheet` is one picture of all plans, `page` an HTML page about them."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from meshwise.base.mesh import Mesh
from meshwise.base.text_format import time_text
from meshwise.base.timeline import EDGE_KINDS, Event, Timeline, TimelineRow
from meshwise.pipeline.schedules.schedule_table import COMPUTE, ActionKind
from meshwise.simulate.predicted_memory import size_text
from meshwise.simulate.step_prediction import MemoryHistory, MemoryLevel
from meshwise.simulate.step_tape import Category
from meshwise.view.picture import (
    UNSEEN,
    Bars,
    Box,
    Picture,
    PicturePath,
    PictureText,
    Plot,
    Point,
    Shape,
    html_document,
    html_table,
    legend,
    stacked,
    svg,
    text_width,
    ticks,
)
from meshwise.view.plan_account import PlanAccount, comparison_table
from meshwise.view.text_pictures import SHADES, label

WIDTH, LEFT, RIGHT = 1180.0, 104.0, 16.0
"""Width of the picture, and its margins on the left (with the names of ranks) and on the right."""
PAINTS: Mapping[str, str] = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "input",
    ActionKind.W: "weights",
}
"""Paint of each kind of computation."""
MEANINGS: Mapping[str, str] = {
    **{paint: SHADES[kind][0] for kind, paint in PAINTS.items()},
    "update": "update",
    "between": "around",
    "wait": "waits",
    "collective": "collectives",
    "message": "messages",
    "tier": "between tiers",
}
"""Meaning of each paint, in the order of the legend."""
_BESIDE: Mapping[TimelineRow, str] = {
    TimelineRow.COLLECTIVE: "collective",
    TimelineRow.LINK: "message",
    TimelineRow.TIERS: "tier",
}
_HEIGHTS = ((8, 26.0), (24, 18.0), (10**9, 11.0))
_OVER = 0.62
"""Fraction of a bar's height that stays visible above the waits."""
_TRACK, _TITLE, _LEGEND, _AXIS, _MOST_TICKS = 4.0, 26.0, 24.0, 24.0, 10


def timeline_picture(
    timeline: Timeline, *, title: str, rows: Sequence[str] = (), span: float | None = None, unit: str = "s"
) -> Picture:
    """Return the picture. `rows`: names of the ranks (default: numbers); `span`: time of the width (default: step)."""
    names = rows or [f"rank {rank}" for rank in range(timeline.ranks)]
    drawing = _Drawing.of(timeline, names)
    height = drawing.pitch * timeline.ranks
    plot = Plot(LEFT, _TITLE, WIDTH - LEFT - RIGHT, height, span or timeline.seconds, unit, ())
    bars = [bars for rank in range(timeline.ranks) for bars in drawing.bars(rank, plot)]
    used = {bars.paint.removesuffix("-2") for bars in bars}
    texts = tuple(text for rank in range(timeline.ranks) for text in drawing.texts(rank, plot))
    fixed: list[Shape] = [PictureText(title, LEFT, 12, "faint", 11)]
    for rank, name in enumerate(names):
        fixed.append(Bars("row", ((LEFT, _TITLE + rank * drawing.pitch, plot.width, drawing.bar),)))
        fixed.append(PictureText(name, LEFT - 8, _TITLE + rank * drawing.pitch + drawing.bar / 2, "ink", 11, "end"))
    entries = [(paint, meaning) for paint, meaning in MEANINGS.items() if paint in used]
    below = _TITLE + height + _AXIS
    fixed += legend(entries, x=LEFT, y=below + _LEGEND / 2)
    plot = replace(plot, shapes=tuple(bars), axis=tuple(time_axis(plot)), texts=texts, brief=timeline.one_stage_each)
    return Picture(title, WIDTH, below + _LEGEND, tuple(fixed), plot)


def time_axis(plot: Plot) -> Iterator[Shape]:
    """Yield the vertical lines at round times of a plot, and texts of these times below the plot."""
    for time in ticks(plot.span, most=_MOST_TICKS):
        x = plot.x(time)
        yield PicturePath("grid", ((x, 0), (x, plot.height + 4)))
        yield PictureText(time_text(time, unit=plot.unit), x, plot.height + 13, "faint", 10, "middle")


@dataclass(frozen=True)
class _Drawing:
    """Layout of a timeline: heights, tracks, and the events of each rank."""

    timeline: Timeline
    names: Sequence[str]
    bar: float
    tracks: tuple[TimelineRow, ...]
    events: Mapping[int, Sequence[Event]]

    @classmethod
    def of(cls, timeline: Timeline, names: Sequence[str]) -> "_Drawing":
        events: dict[int, list[Event]] = defaultdict(list)
        for event in timeline.events:
            events[event.rank].append(event)
        beside = {event.stream for event in timeline.events if event.is_background and event.seconds > 0}
        tracks = tuple(stream for stream in _BESIDE if stream in beside)
        bar = next(height for most, height in _HEIGHTS if timeline.ranks <= most)
        return cls(timeline, names, bar, tracks, events)

    @property
    def pitch(self) -> float:
        """Distance from one row to the next."""
        return self.bar + _TRACK * len(self.tracks) + (6 if self.bar > _HEIGHTS[-1][1] else 3)

    def bars(self, rank: int, plot: Plot) -> Iterator[Bars]:
        """Yield the bars of a rank, grouped by paint, with the waits last so that they are drawn on top."""
        boxes: dict[str, list[Box]] = defaultdict(list)
        names: dict[str, list[str]] = defaultdict(list)
        top = rank * self.pitch
        for event in self.events[rank]:
            if event.seconds <= 0:
                continue
            y, height = top, self.bar
            if event.is_background:
                y, height = top + self.bar + 1 + _TRACK * self.tracks.index(event.stream), _TRACK - 1
            paint = self._paint(event)
            if paint == "wait":
                y, height = top + _OVER * self.bar, (1 - _OVER) * self.bar
            boxes[paint].append((plot.x(event.start), y, plot.x(event.seconds), height))
            names[paint].append(f"waits for {event}" if event.stream is TimelineRow.WAIT else str(event))
        for paint in sorted(boxes, key=lambda paint: (paint == "wait", paint != UNSEEN)):
            yield Bars(paint, tuple(boxes[paint]), tuple(names[paint]), self.names[rank])

    def texts(self, rank: int, plot: Plot) -> Iterator[PictureText]:
        """Yield the names of the computations that have room for them."""
        size = 9.0 if self.bar > _HEIGHTS[-1][1] else 8.0
        for event in self.timeline.computing[rank]:
            name = label(event, timeline=self.timeline)
            if plot.x(event.seconds) > text_width(name, size=size) + 2:
                middle = plot.x((event.start + event.stop) / 2)
                yield PictureText(name, middle, rank * self.pitch + self.bar / 2, "inside", size, "middle")

    def _paint(self, event: Event) -> str:
        if event.kind in COMPUTE:
            stages = self.timeline.stages[event.rank]
            return PAINTS[event.kind] + ("-2" if stages.index(event.stage or 0) % 2 else "")
        if event.is_background:
            return _BESIDE[event.stream]
        if event.stream is TimelineRow.WAIT:
            return "wait" if event.exposed else UNSEEN
        return "between" if event.kind in EDGE_KINDS else "update"


_AREAS_TOP, _AREAS_HEIGHT = 24.0, 110.0
_STEPS = 4


def memory_pictures(
    histories: Sequence[MemoryHistory], *, names: Sequence[str], span: float, most: float, limit: float = 0.0
) -> Iterator[Picture]:
    """Yield a picture for each history, all to one scale: `most` bytes high, or `limit` bytes if that is little more.

    `names`: the ranks along pp; `span`: seconds of the whole width; `limit`: bytes that a rank may use (0: unknown)."""
    if not histories:
        return
    top = 1.05 * (limit if most < limit < 1.8 * most else most)
    held = {category for each in histories for level in each.levels for category, size in level.device.items() if size}
    categories = [category for category in Category if category in held]
    lines: list[Shape] = []
    unit = 1024 ** int(math.log(top, 1024))
    for size in (number * unit for number in ticks(top / unit, most=_STEPS)):
        y = _AREAS_TOP + _AREAS_HEIGHT * (1 - size / top)
        lines.append(PicturePath("grid", ((LEFT - 4, y), (WIDTH - RIGHT, y))))
        lines.append(PictureText(size_text(size), LEFT - 8, y, "faint", 10, "end"))
    bottom = _AREAS_TOP + _AREAS_HEIGHT + _AXIS
    for history in histories:
        name, is_last = names[history.index], history is histories[-1]
        plot = Plot(LEFT, _AREAS_TOP, WIDTH - LEFT - RIGHT, _AREAS_HEIGHT, span, "s", ())
        title = f"memory of {name}: at most {size_text(history.peak.bytes)}, during {history.peak.during}"
        shapes = [
            PictureText(title, LEFT, 12, "faint", 11),
            Bars("row", ((LEFT, _AREAS_TOP, plot.width, _AREAS_HEIGHT),)),
            *lines,
        ]
        if is_last:
            shapes += legend([(category, category) for category in categories], x=LEFT, y=bottom + _LEGEND / 2)
        inside: list[Shape] = [*_areas(history, categories, top, plot)]
        if 0 < limit <= top:
            y = _AREAS_HEIGHT * (1 - limit / top)
            inside.append(PicturePath("limit", ((0, y), (plot.width, y))))
        moments = pairwise([*(level.seconds for level in history.levels), history.seconds])
        boxes = ((plot.x(start), 0.0, plot.x(stop - start), plot.height) for start, stop in moments)
        inside.append(Bars(UNSEEN, tuple(boxes), tuple(map(_sizes, history.levels)), name))  # texts under the pointer
        plot = replace(plot, shapes=tuple(inside), axis=tuple(time_axis(plot)))
        yield Picture(title, WIDTH, bottom + _LEGEND * is_last, tuple(shapes), plot)


def _areas(history: MemoryHistory, categories: Sequence[Category], top: float, plot: Plot) -> Iterator[PicturePath]:
    """Yield a filled staircase for each category. The first category is at the bottom and drawn over the others."""
    moments = [*(level.seconds for level in history.levels), history.seconds]
    for count in range(len(categories), 0, -1):
        points = [(0.0, plot.height)]
        for level, (start, stop) in zip(history.levels, pairwise(moments), strict=True):
            y = plot.height * (1 - sum(level.device.get(category, 0) for category in categories[:count]) / top)
            points += [(plot.x(start), y), (plot.x(stop), y)]
        yield PicturePath(categories[count - 1], (*points, (plot.x(history.seconds), plot.height)), filled=True)


def _sizes(level: MemoryLevel) -> str:
    parts = (f"{category} {size_text(size)}" for category, size in level.device.items() if size)
    return f"{size_text(level.bytes)}{level.during and f' during {level.during}'}: {', '.join(parts)}"


_MOST = (16, 8, 8, 4)
"""Largest number of shown indices per axis: across a grid, down a grid, grids in a row, rows of grids."""
_TONES = 6
_HIGH, _GAP, _LABEL, _LEAST = 24.0, 2.0, 18.0, 40.0
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
                indent = sheet.left if under is None else 0
                shapes.append(PictureText("…", x + indent, y + sheet.high / 2, "faint", 14))
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


def pictures(accounts: Sequence[PlanAccount]) -> Iterator[list[Picture]]:
    """Yield, for each plan, its pictures: the timeline, then memory of ranks and the mesh if they are known."""
    span = max(account.timeline.seconds for account in accounts)
    most = max((history.peak.bytes for account in accounts for history in account.histories), default=0)
    for account in accounts:
        seconds, unit = account.timeline.seconds, account.unit
        title = f"step {time_text(seconds, unit=unit)}, bubble {100 * account.timeline.spent['bubble'] / seconds:.1f} %"
        drawn = [timeline_picture(account.timeline, title=title, rows=account.names, span=span, unit=unit)]
        limit = account.room
        drawn += memory_pictures(account.histories, names=account.names, span=span, most=most, limit=limit)
        if account.mesh is not None:
            drawn.append(mesh_picture(account.mesh, ranks_per_node=account.ranks_per_node))
        yield drawn


def picture_sheet(accounts: Sequence[PlanAccount]) -> Picture:
    """Return all pictures of all plans as one picture."""
    parts: list[Picture] = []
    for account, drawn in zip(accounts, pictures(accounts), strict=True):
        parts += [Picture(account.title, WIDTH, 24, (PictureText(account.title, 0, 12, size=15),)), *drawn]
    return stacked(parts)


def page(accounts: Sequence[PlanAccount], *, title: str) -> str:
    """Return an HTML page about some plans: a table of them, then pictures of each plan in one time scale."""
    table = html_table(comparison_table(accounts))
    body = f'<h1>{escape(title)}</h1><section id="overview"><div class="wide">{table}</div></section>'
    for number, (account, drawn) in enumerate(zip(accounts, pictures(accounts), strict=True), start=1):
        figures = "".join(f"<figure>{svg(picture)}</figure>" for picture in drawn)
        body += f'<section class="plan" id="plan-{number}"><h2>{escape(account.title)}</h2>{figures}</section>'
    return html_document(body, title=title)

"""Draw the timeline, memory and mesh of plans as pictures (`pictures`), all plans to the same scale.

docs/view.md shows examples of `timeline_picture`, `memory_pictures`, `mesh_picture` and `page`. A mesh has grids of the
two innermost axes; a long axis is shown by its first indices and its last index."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise

from meshwise.base.mesh import Mesh
from meshwise.base.step_timeline import EDGE_KINDS, Event, Timeline, TimelineRow
from meshwise.base.text_format import time_text
from meshwise.pipeline.schedules.schedule_table import COMPUTE
from meshwise.simulate.predicted_memory import size_text
from meshwise.simulate.step_prediction import MemoryHistory, MemoryLevel
from meshwise.simulate.step_tape import Category
from meshwise.view.drawing_data import PlanAccount, comparison_table
from meshwise.view.picture import (
    UNSEEN,
    Bars,
    Box,
    Picture,
    PicturePath,
    PictureText,
    Plot,
    Shape,
    html_document,
    html_table,
    legend,
    stacked,
    svg,
    text_width,
    ticks,
)
from meshwise.view.text_pictures import LEGEND, label

WIDTH, LEFT, RIGHT = 1180.0, 104.0, 16.0
"""Width of the picture, and its margins on the left (with the names of ranks) and on the right."""
_PAINTS: Mapping[str, str] = {
    row["letter"]: row["paint"] for row in LEGEND.values() if {"letter", "paint"} <= row.keys()
}
_BESIDE: Mapping[TimelineRow, str] = {
    TimelineRow.COLLECTIVE: "collective",
    TimelineRow.LINK: "message",
    TimelineRow.TIERS: "tier",
}
_HEIGHTS = ((8, 26.0), (24, 18.0), (10**9, 11.0))  # most ranks, height of a bar
_OVER = 0.62
"""Fraction of a bar's height that stays visible above the waits."""
_TRACK, _TITLE, _LEGEND, _AXIS, _MOST_TICKS = 4.0, 26.0, 24.0, 24.0, 10


def timeline_picture(
    timeline: Timeline, *, title: str, rows: Sequence[str] = (), span: float | None = None, unit: str = "s"
) -> Picture:
    """Return a picture. `rows`: names of the ranks (default: numbers); `span`: time of the width (default: step)."""
    names = rows or [f"rank {rank}" for rank in range(timeline.ranks)]
    drawing = _Drawing(timeline, names)
    height = drawing.pitch * timeline.ranks
    plot = Plot(LEFT, _TITLE, WIDTH - LEFT - RIGHT, height, span or timeline.seconds, unit, ())
    bars = [bars for rank in range(timeline.ranks) for bars in drawing.bars(rank, plot)]
    used = {bars.paint.removesuffix("-2") for bars in bars}
    texts = tuple(text for rank in range(timeline.ranks) for text in drawing.texts(rank, plot))
    fixed: list[Shape] = [PictureText(title, LEFT, 12, "faint", 11)]
    for rank, name in enumerate(names):
        fixed.append(Bars("row", ((LEFT, _TITLE + rank * drawing.pitch, plot.width, drawing.bar),)))
        fixed.append(PictureText(name, LEFT - 8, _TITLE + rank * drawing.pitch + drawing.bar / 2, "ink", 11, "end"))
    entries = [(row["paint"], meaning) for meaning, row in LEGEND.items() if row.get("paint") in used]
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


class _Drawing:
    """Layout of a timeline: the height of a bar and of a row, the tracks below a bar, and the events of each rank."""

    def __init__(self, timeline: Timeline, names: Sequence[str]) -> None:
        self.timeline, self.names = timeline, names
        self.events: dict[int, list[Event]] = defaultdict(list)
        for event in timeline.events:
            self.events[event.rank].append(event)
        beside = {event.row for event in timeline.events if event.is_background and event.seconds > 0}
        self.tracks = [row for row in _BESIDE if row in beside]
        self.bar = next(height for most, height in _HEIGHTS if timeline.ranks <= most)
        self.pitch = self.bar + _TRACK * len(self.tracks) + (6 if self.bar > _HEIGHTS[-1][1] else 3)

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
                y, height = top + self.bar + 1 + _TRACK * self.tracks.index(event.row), _TRACK - 1
            paint = self._paint(event)
            if paint == "wait":
                y, height = top + _OVER * self.bar, (1 - _OVER) * self.bar
            boxes[paint].append((plot.x(event.start), y, plot.x(event.seconds), height))
            names[paint].append(f"waits for {event}" if event.row is TimelineRow.WAIT else str(event))
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
            return _PAINTS[event.kind] + ("-2" if stages.index(event.stage or 0) % 2 else "")
        if event.is_background:
            return _BESIDE[event.row]
        if event.row is TimelineRow.WAIT:
            return "wait" if event.exposed else UNSEEN
        return "between" if event.kind in EDGE_KINDS else "update"


_AREAS_TOP, _AREAS_HEIGHT = 24.0, 110.0


def memory_pictures(
    histories: Sequence[MemoryHistory], *, names: Sequence[str], span: float, most: float, limit: float = 0.0
) -> Iterator[Picture]:
    """Yield a picture for each history, all `most` bytes high, or `limit` bytes if it is above but below 1.8 · `most`.

    `names`: the ranks along pp; `span`: seconds of the whole width; `limit`: bytes that a rank may use (0: unknown)."""
    if not histories:
        return
    top = 1.05 * (limit if most < limit < 1.8 * most else most)
    held = {category for each in histories for level in each.levels for category, size in level.device.items() if size}
    categories = [category for category in Category if category in held]
    lines: list[Shape] = []
    unit = 1024 ** int(math.log(top, 1024))
    for size in (number * unit for number in ticks(top / unit, most=4)):
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


_TONES, _MOST_GRIDS = 6, 12
_HIGH, _GAP, _LABEL, _LEAST = 24.0, 2.0, 18.0, 40.0


def mesh_picture(mesh: Mesh, *, ranks_per_node: int = 0) -> Picture:
    """Return the picture of a mesh. Nodes have different colours, unless `ranks_per_node` is 0 (unknown)."""
    cell = _GAP + max(_LEAST, 12 + text_width(str(mesh.size - 1), size=11))
    nodes = f", {ranks_per_node} to a node" if ranks_per_node else ""
    grids, boxes = list(mesh.grids()), dict[int, Box]()
    some = f"; the first {_MOST_GRIDS} of {len(grids)} grids" if len(grids) > _MOST_GRIDS else ""
    texts = [PictureText(f"{mesh.size} rank{'s' * (mesh.size > 1)}{nodes}{some}", 0, 10, size=13)]
    x, y, right, bottom = 0.0, _TITLE, 340.0, _TITLE  # at least as wide as its title
    for grid in grids[:_MOST_GRIDS]:
        left = 14 + max(text_width(line[0], size=10) for line in grid.rows)
        wide = left + cell * max(map(len, grid.rows)) - cell + 22
        if x and x + wide > WIDTH:
            x, y = 0.0, bottom
        top = y + _LABEL * bool(grid.title)
        texts.append(PictureText(grid.title, x + left, y + _LABEL / 2, size=11))
        across, *indices = grid.head or [""]
        head = [index if index == "…" else f"{across} {index}" for index in indices]
        for row, (name, *cells) in enumerate([["", *head], *grid.rows]):
            middle = top + row * (_HIGH + _GAP) + _HIGH / 2
            texts.append(PictureText(name, x + left - 8, middle, "faint", 10, "end"))
            for column, text in enumerate(cells):
                at = x + left + column * cell
                texts.append(PictureText(text, at + (cell - _GAP) / 2, middle, "ink" if row else "faint", 11, "middle"))
                if row and text.isdecimal():
                    boxes[int(text)] = at, middle - _HIGH / 2, cell - _GAP, _HIGH
        x, right, bottom = x + wide, max(right, x + wide), top + (1 + len(grid.rows)) * (_HIGH + _GAP) + 14
    return Picture(str(mesh), right, bottom, (*_cells(mesh, boxes, ranks_per_node), *texts))


def _cells(mesh: Mesh, boxes: Mapping[int, Box], ranks_per_node: int) -> Iterator[Bars]:
    """Yield the cells of each node in its colour, given the box of each rank."""
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in boxes:
        nodes[rank // (ranks_per_node or mesh.size)].append(rank)
    for node, ranks in nodes.items():
        where = f", node {node}" if ranks_per_node else ""
        names = []
        for rank in ranks:
            place = " ".join(f"{name} {at}" for name, at in mesh.coordinate(rank).items() if mesh.degree(name) > 1)
            names.append(f"rank {rank}{place and f': {place}'}{where}")
        yield Bars(f"node-{node % _TONES}", tuple(boxes[rank] for rank in ranks), tuple(names))


def pictures(accounts: Sequence[PlanAccount]) -> Iterator[list[Picture]]:
    """Yield, for each plan, its pictures: the timeline, then memory of ranks and the mesh if they are known."""
    span = max(account.timeline.seconds for account in accounts)
    most = max((history.peak.bytes for account in accounts for history in account.histories), default=0)
    for account in accounts:
        seconds, unit = account.timeline.seconds, account.unit
        title = f"step {time_text(seconds, unit=unit)}, bubble {100 * account.timeline.spent['bubble'] / seconds:.1f} %"
        drawn = [timeline_picture(account.timeline, title=title, rows=account.names, span=span, unit=unit)]
        drawn += memory_pictures(account.histories, names=account.names, span=span, most=most, limit=account.room)
        if account.plan is not None:
            drawn.append(mesh_picture(account.plan.mesh(), ranks_per_node=account.ranks_per_node))
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

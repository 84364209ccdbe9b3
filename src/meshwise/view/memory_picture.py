"""Memory over time as a picture: what a rank holds of each category, one above the other, over the step's time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from meshwise.simulate.history import History, Level
from meshwise.simulate.tables import text as size_text
from meshwise.simulate.tape import Category
from meshwise.view.palette import UNSEEN
from meshwise.view.picture import Bars, Path, Picture, Plot, Shape, Text, legend
from meshwise.view.timeline_picture import LEFT, RIGHT, WIDTH, time_axis

_TITLE, _HEIGHT, _AXIS, _LEGEND = 26.0, 130.0, 24.0, 24.0
_STEPS = 4


def memory_picture(
    history: History, *, title: str, span: float | None = None, top: float | None = None, limit: float = 0.0
) -> Picture:
    """The memory of one rank. `top` is what the height stands for, `limit` the bytes there are, 0 where unknown."""
    span, top = span or history.seconds, 1.05 * (top or history.peak.bytes)
    if top < 1.05 * limit < 2 * top:
        top = 1.05 * limit
    levels = history.levels
    plot = Plot(LEFT, _TITLE, WIDTH - LEFT - RIGHT, _HEIGHT, span, "s", ())
    fixed: list[Shape] = [Text(title, 0, 10, size=13), Bars("lane", ((LEFT, _TITLE, plot.width, _HEIGHT),))]
    for step in range(_STEPS + 1):
        y = _TITLE + _HEIGHT * (1 - step / _STEPS)
        fixed.append(Path("grid", ((LEFT - 4, y), (LEFT + plot.width, y))))
        fixed.append(Text(size_text(top * step / _STEPS), LEFT - 8, y, "faint", 10, "end"))
    fixed += time_axis(plot)
    held = [category for category in Category if any(level.device.get(category) for level in levels)]
    below = _TITLE + _HEIGHT + _AXIS
    fixed += legend([(category, category) for category in held], x=LEFT, y=below + _LEGEND / 2)
    areas = _areas(levels, held, plot, end=history.seconds, top=top)
    border = (Path("limit", ((0, y := _HEIGHT * (1 - limit / top)), (plot.width, y))),) if 0 < limit <= top else ()
    told = _told(levels, plot, end=history.seconds, row=title)
    plot = Plot(LEFT, _TITLE, plot.width, _HEIGHT, span, "s", (*areas, *border, told))
    return Picture(title, WIDTH, below + _LEGEND, tuple(fixed), plot)


def _areas(levels: Sequence[Level], held: Sequence[Category], plot: Plot, *, end: float, top: float) -> Iterator[Path]:
    """A staircase for each category, the first at the bottom, each drawn down to the ground behind those before it."""
    moments = [*(level.seconds for level in levels), end]
    for count in range(len(held), 0, -1):
        points = [(0.0, plot.height)]
        for level, (start, stop) in zip(levels, pairwise(moments), strict=True):
            y = plot.height * (1 - sum(level.device.get(category, 0) for category in held[:count]) / top)
            points += [(plot.x(start), y), (plot.x(stop), y)]
        yield Path(held[count - 1], (*points, (plot.x(end), plot.height)), filled=True)


def _told(levels: Sequence[Level], plot: Plot, *, end: float, row: str) -> Bars:
    """What can be pointed at: every moment, with what is held then."""
    moments = [*(level.seconds for level in levels), end]
    boxes = tuple((plot.x(start), 0.0, plot.x(stop - start), plot.height) for start, stop in pairwise(moments))
    return Bars(UNSEEN, boxes, tuple(map(_sizes, levels)), row)


def _sizes(level: Level) -> str:
    parts = (f"{category} {size_text(size)}" for category, size in level.device.items() if size)
    return f"{size_text(level.bytes)} during {level.during or 'the step'}: {', '.join(parts)}"

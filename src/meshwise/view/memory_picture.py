"""Draw the memory of a rank over a step: one area for each category, above one another."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from meshwise.simulate.predicted_memory import size_text
from meshwise.simulate.step_prediction import MemoryHistory, MemoryLevel
from meshwise.simulate.step_tape import Category
from meshwise.view.palette import UNSEEN
from meshwise.view.shapes import Bars, Picture, PicturePath, PictureText, Plot, Shape, legend, ticks
from meshwise.view.timeline_picture import LEFT, RIGHT, WIDTH, time_axis

_TITLE, _HEIGHT, _AXIS, _LEGEND = 24.0, 110.0, 24.0, 24.0
_STEPS = 4


def memory_pictures(
    histories: Sequence[MemoryHistory], *, names: Sequence[str], span: float, most: float, limit: float = 0.0
) -> Iterator[Picture]:
    """Yield a picture for each history, all to one scale: `most` bytes high, or `limit` bytes if that is little more.

    `names`: the ranks along pp; `span`: seconds of the whole width; `limit`: bytes that a rank may use (0: unknown)."""
    if not histories:
        return
    top = 1.05 * (limit if most < limit < 1.8 * most else most)
    categories = [category for category in Category if any(each.holds(category) for each in histories)]
    lines: list[Shape] = []
    unit = 1024 ** int(math.log(top, 1024))
    for size in (number * unit for number in ticks(top / unit, most=_STEPS)):
        y = _TITLE + _HEIGHT * (1 - size / top)
        lines.append(PicturePath("grid", ((LEFT - 4, y), (WIDTH - RIGHT, y))))
        lines.append(PictureText(size_text(size), LEFT - 8, y, "faint", 10, "end"))
    bottom = _TITLE + _HEIGHT + _AXIS
    for history in histories:
        name, is_last = names[history.index], history is histories[-1]
        plot = Plot(LEFT, _TITLE, WIDTH - LEFT - RIGHT, _HEIGHT, span, "s", ())
        title = f"memory of {name}: at most {size_text(history.peak.bytes)}, during {history.peak.during}"
        shapes = [
            PictureText(title, LEFT, 12, "faint", 11),
            Bars("row", ((LEFT, _TITLE, plot.width, _HEIGHT),)),
            *lines,
        ]
        if is_last:
            shapes += legend([(category, category) for category in categories], x=LEFT, y=bottom + _LEGEND / 2)
        inside: list[Shape] = [*_areas(history, categories, top, plot)]
        if 0 < limit <= top:
            y = _HEIGHT * (1 - limit / top)
            inside.append(PicturePath("limit", ((0, y), (plot.width, y))))
        inside.append(_hover_bars(history, plot, row=name))
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


def _hover_bars(history: MemoryHistory, plot: Plot, *, row: str) -> Bars:
    """Return invisible bars that show the memory of each moment under the pointer."""
    moments = [*(level.seconds for level in history.levels), history.seconds]
    boxes = ((plot.x(start), 0.0, plot.x(stop - start), plot.height) for start, stop in pairwise(moments))
    return Bars(UNSEEN, tuple(boxes), tuple(map(_sizes, history.levels)), row)


def _sizes(level: MemoryLevel) -> str:
    parts = (f"{category} {size_text(size)}" for category, size in level.device.items() if size)
    return f"{size_text(level.bytes)}{level.during and f' during {level.during}'}: {', '.join(parts)}"

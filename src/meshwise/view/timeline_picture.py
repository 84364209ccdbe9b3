"""Draw a timeline as a picture: a row for every rank, time to the right.

rank 0  ┃ F0 ┃ F1 ┃░░░░┃   B0   ┃▒ F2 ▒┃ … ┃ update ┃     computations, with the waits drawn over them
          | ▂▂▂▂▂▂    ▂▂▂▂▂                                 collectives, messages and moves between tiers, each on
          |                                                 its own track, if there are any"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwise.base.text_format import time_text
from meshwise.base.timeline import EDGE_KINDS, Event, Timeline, TimelineRow
from meshwise.pipeline.schedules.schedule_table import COMPUTE, ActionKind
from meshwise.view.palette import UNSEEN
from meshwise.view.schedule_text import label
from meshwise.view.shapes import Bars, Box, Picture, PicturePath, PictureText, Plot, Shape, legend, text_width, ticks

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
    "forward": "forward",
    "backward": "backward",
    "input": "backward, input",
    "weights": "backward, weights",
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
        tracks = tuple(
            stream
            for stream in _BESIDE
            if any(event.is_background and event.stream is stream and event.seconds > 0 for event in timeline.events)
        )
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

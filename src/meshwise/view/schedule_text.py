"""Draw a timed schedule as text: a row for each rank, time to the right, and a letter for the kind of computation.

    rank 0 │F0 F1 .  .  B0─── .  B1───
    rank 1 │.  F0 B0─── F1 B1─── .  .

A column is as long as the shortest computation; `─` continues a longer computation. `F0` is the forward of micro-batch
0. A rank with several stages writes the stage first: `2F0`."""

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from meshwise.base.timeline import Event, Timeline, TimelineRow
from meshwise.pipeline.schedules.schedule_table import ActionKind

STYLES: Mapping[ActionKind, str] = {
    ActionKind.F: "black on bright_blue",
    ActionKind.B: "black on green",
    ActionKind.I: "black on cyan",
    ActionKind.W: "black on yellow",
}
"""Rich style of each kind of computation."""
SHADES: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward, input",
    "W": "backward, weights",
    "▒": "waits",
    "u": "update",
    "░": "around",
    ".": "bubble",
}
"""Meaning of each character in a drawing to scale, in the words of other pictures."""


def draw_in_columns(timeline: Timeline, *, width: int) -> Text:
    """Return a drawing in panels of at most `width` characters; a column is as long as the shortest computation."""
    unit = min(event.seconds for row in timeline.computing for event in row)
    names = [f"rank {rank:>{len(str(timeline.ranks - 1))}} │" for rank in range(timeline.ranks)]
    cell = 1 + max(len(label(event, timeline=timeline)) for row in timeline.computing for event in row)
    columns = math.floor(timeline.seconds / unit + 0.5)
    rows = [Text().append_tokens(_cells(timeline, rank, unit, columns, cell)) for rank in range(timeline.ranks)]
    panel = max(1, (width - len(names[0])) // cell) * cell
    folded = [row.divide(range(panel, columns * cell, panel)) for row in rows]
    lines: list[Text] = []
    for parts in zip(*folded, strict=True):
        lines += [Text()] * bool(lines)
        lines += (Text(name).append_text(part) for name, part in zip(names, parts, strict=True))
    return Text("\n").join(lines)


def draw_to_scale(timeline: Timeline, *, width: int, seconds: float, rows: Sequence[str] = ()) -> Text:
    """Return a drawing to scale with a legend, with one row for each rank. `seconds` fill `width` characters.

    Events shorter than a character are left out. `rows`: names of the ranks, by default their numbers."""
    heads = rows or [f"rank {rank}" for rank in range(timeline.ranks)]
    longest = max(map(len, heads))
    scale = (width - longest - 2) / seconds
    drawn = [_scaled(timeline, rank, scale) for rank in range(timeline.ranks)]
    lines = [Text(f"{head:<{longest}} │") + row for head, row in zip(heads, drawn, strict=True)]
    used = {letter for row in drawn for letter in row.plain}
    legend: list[Text] = []
    for entry in _legend():
        if entry[0] in used:
            text = Text.assemble("  ", entry, f" {SHADES[entry[0]]}")
            if not legend or len(legend[-1]) + len(text) > width:
                legend.append(Text(" " * longest))
            legend[-1] += text
    return Text("\n").join([*lines, *legend])


def _legend() -> Iterator[tuple[str, str]]:
    """Yield (character, style) of each kind of computation and each other activity."""
    yield from ((str(kind), style) for kind, style in STYLES.items())
    yield from (("▒", "red"), ("u", ""), ("░", ""), (".", "dim"))


def _scaled(timeline: Timeline, rank: int, scale: float) -> Text:
    row = Text()
    spots = [
        event
        for event in timeline.events
        if event.rank == rank and not event.is_background and event.stream is not TimelineRow.WAIT
    ]
    for event in sorted(spots, key=lambda event: event.start):
        first, last = (math.floor(moment * scale + 0.5) for moment in (event.start, event.stop))
        row.append("." * (first - len(row)), "dim")
        if event.stream is TimelineRow.COMPUTE:
            drawn = label(event, timeline=timeline).ljust(last - first, "─")
            row.append(drawn[: last - first], STYLES[ActionKind(event.kind)])
        else:
            row.append(("u" if event.kind == "update" else "░") * (last - max(first, len(row))))
    row.append("." * (math.floor(timeline.seconds * scale + 0.5) - len(row)), "dim")
    for event in timeline.waiting[rank]:
        first, last = (math.floor(moment * scale + 0.5) for moment in (event.start, event.stop))
        if event.exposed and last > first:
            row = row[:first] + Text("▒" * (last - first), "red") + row[last:]
    return row


def label(event: Event, *, timeline: Timeline) -> str:
    """Return the label of a computation, with its stage if any rank has several stages."""
    return f"{'' if timeline.one_stage_each else event.stage}{event.kind}{event.microbatch}"


def _cells(timeline: Timeline, rank: int, unit: float, columns: int, cell: int) -> Iterator[tuple[str, str]]:
    """Yield the text and style of each cell of a row, from left to right."""
    nothing, column = ". ".ljust(cell), 0
    for event, first, last in _placed(timeline, rank, unit):
        yield nothing * (first - column), "dim"
        yield label(event, timeline=timeline).ljust((last - first) * cell - 1, "─"), STYLES[ActionKind(event.kind)]
        yield " ", ""
        column = last
    yield nothing * (columns - column), "dim"


def _placed(timeline: Timeline, rank: int, unit: float) -> Iterator[tuple[Event, int, int]]:
    """Yield (computation, first column, column after the last) for each computation of a rank."""
    for event in timeline.computing[rank]:
        yield event, math.floor(event.start / unit + 0.5), math.floor(event.stop / unit + 0.5)


def rank_table(timeline: Timeline, *, peaks: Sequence[float]) -> Table:
    """Return a table of each rank: its stages, computing and idle time, and `peaks`, its peak memory in any unit."""
    table = Table(box=None, pad_edge=False, caption=f"step {timeline.seconds:.6g}", caption_justify="left")
    for heading in ("rank", "stages", "computing", "idle within", "bubble of the step", "held at most"):
        table.add_column(heading, justify="left" if heading == "stages" else "right")
    for rank in range(timeline.ranks):
        table.add_row(
            str(rank),
            " ".join(map(str, timeline.stages[rank])),
            f"{timeline.busy[rank]:.6g}",
            f"{timeline.idle[rank]:.6g}",
            f"{100 * timeline.bubbles[rank]:.1f} %",
            f"{peaks[rank]:.6g}",
        )
    return table

"""A timed schedule as text: a row per rank, time to the right, a letter for what is computed.

    rank 0 │F0 F1 .  .  B0─── .  B1───
    rank 1 │.  F0 B0─── F1 B1─── .  .

A column is the shortest computation; what takes longer is drawn out. A rank with several stages says which: 2F0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from meshwise.pipeline.action import Kind
from meshwise.pipeline.clock import Event, Timing

STYLES: Mapping[Kind, str] = {
    Kind.F: "black on bright_blue",
    Kind.B: "black on green",
    Kind.I: "black on cyan",
    Kind.W: "black on yellow",
}


def picture(timing: Timing, *, width: int) -> Text:
    """The drawing, folded into panels of at most `width` characters."""
    unit = min(event.end - event.start for row in timing.computing for event in row)
    names = [f"rank {rank:>{len(str(timing.schedule.ranks - 1))}} │" for rank in range(timing.schedule.ranks)]
    cell = 1 + max(len(label(event, timing=timing)) for row in timing.computing for event in row)
    columns = math.floor(timing.seconds / unit + 0.5)
    rows = [_row(timing, rank, unit, columns, cell) for rank in range(timing.schedule.ranks)]
    panel = max(1, (width - len(names[0])) // cell) * cell
    panels = []
    for start in range(0, columns * cell, panel):
        lines = (Text(name) + row[start : start + panel] for name, row in zip(names, rows, strict=True))
        panels.append(Text("\n").join(lines))
    return Text("\n\n").join(panels)


def label(event: Event, *, timing: Timing) -> str:
    """What to call a computation: with its stage where that is not the rank."""
    action = event.action
    own = timing.schedule.stages == timing.schedule.ranks
    return f"{'' if own else action.stage}{action.kind}{action.microbatch}"


def _row(timing: Timing, rank: int, unit: float, columns: int, cell: int) -> Text:
    row = Text()
    for event, first, last in _placed(timing, rank, unit):
        row.append((". ".ljust(cell)) * (first - len(row) // cell), "dim")
        drawn = label(event, timing=timing).ljust((last - first) * cell - 1, "─")
        row.append(drawn, STYLES[event.action.kind])
        row.append(" ")
    row.append((". ".ljust(cell)) * (columns - len(row) // cell), "dim")
    return row


def _placed(timing: Timing, rank: int, unit: float) -> Iterator[tuple[Event, int, int]]:
    """The computations of a rank with their first column and the one after their last."""
    for event in timing.computing[rank]:
        yield event, math.floor(event.start / unit + 0.5), math.floor(event.end / unit + 0.5)


def figures(timing: Timing) -> Table:
    """Per rank: its stages, how long it computes and waits, and the most it holds."""
    table = Table(box=None, pad_edge=False, caption=f"step {timing.seconds:.6g}", caption_justify="left")
    for heading in ("rank", "stages", "computing", "idle within", "bubble of the step", "held at most"):
        table.add_column(heading, justify="left" if heading == "stages" else "right")
    for rank in range(timing.schedule.ranks):
        table.add_row(
            str(rank),
            " ".join(map(str, timing.schedule.stages_of(rank))),
            f"{timing.busy[rank]:.6g}",
            f"{timing.idle[rank]:.6g}",
            f"{100 * timing.bubbles[rank]:.1f} %",
            f"{timing.peaks[rank]:.6g}",
        )
    return table

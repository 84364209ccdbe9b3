"""Draw as text: timed schedules with a row for each rank, and tables of what each rank has.

    rank 0 │F0 F1 .  .  B0─── .  B1───
    rank 1 │.  F0 B0─── F1 B1─── .  .

In `draw_in_columns` a column is as long as the shortest computation; `─` continues a longer computation. `F0` is the
forward of micro-batch 0. A rank with several stages writes the stage first: `2F0` (`label`)."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.text import Text

from meshwise.base.mesh import Mesh, even_split
from meshwise.base.package_table import package_table
from meshwise.base.step_timeline import Event, Timeline, TimelineRow
from meshwise.base.text_format import align_columns
from meshwise.plan import Plan

LEGEND: Mapping[str, Mapping[str, str]] = package_table("view/legend.toml")
"""Letter, rich style and paint of what timelines draw, by meaning."""
SHADES: Mapping[str, tuple[str, str]] = {
    row["letter"]: (meaning, row["style"]) for meaning, row in LEGEND.items() if "letter" in row
}
"""Legend of drawings to scale: the meaning of each letter, and its rich style."""


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


def draw_to_scale(timeline: Timeline, *, width: int, seconds: float, rows: Sequence[str]) -> Text:
    """Return a drawing to scale with a legend, with one row for each rank. `seconds` fill `width` characters.

    Events shorter than a character are left out. `rows`: names of the ranks."""
    longest = max(map(len, rows))
    scale = (width - longest - 2) / seconds
    drawn = [_scaled(timeline, rank, scale) for rank in range(timeline.ranks)]
    lines = [Text(f"{name:<{longest}} │") + row for name, row in zip(rows, drawn, strict=True)]
    used = {letter for row in drawn for letter in row.plain}
    legend: list[Text] = []
    for letter, (meaning, style) in SHADES.items():
        if letter in used:
            text = Text.assemble("  ", (letter, style), f" {meaning}")
            if not legend or len(legend[-1]) + len(text) > width:
                legend.append(Text(" " * longest))
            legend[-1] += text
    return Text("\n").join([*lines, *legend])


def _scaled(timeline: Timeline, rank: int, scale: float) -> Text:
    row = Text()
    own = (event for event in timeline.events if event.rank == rank and not event.is_background)
    spots = [event for event in own if event.row is not TimelineRow.WAIT]
    for event in sorted(spots, key=lambda event: event.start):
        first, last = (math.floor(moment * scale + 0.5) for moment in (event.start, event.stop))
        row.append("." * (first - len(row)), "dim")
        if event.row is TimelineRow.COMPUTE:
            drawn = label(event, timeline=timeline).ljust(last - first, "─")
            row.append(drawn[: last - first], SHADES[event.kind][1])
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
    for event in timeline.computing[rank]:
        first, last = (math.floor(moment / unit + 0.5) for moment in (event.start, event.stop))
        yield nothing * (first - column), "dim"
        yield label(event, timeline=timeline).ljust((last - first) * cell - 1, "─"), SHADES[event.kind][1]
        yield " ", ""
        column = last
    yield nothing * (columns - column), "dim"


def rank_table(timeline: Timeline, *, peaks: Sequence[float]) -> str:
    """Return a table of each rank: its stages, computing and idle time, and `peaks`, its peak memory in any unit."""
    rows: list[tuple[str, ...]] = [("rank", "stages", "computing", "idle within", "bubble of the step", "held at most")]
    for rank, stages in enumerate(timeline.stages):
        bubble = f"{100 * timeline.bubbles[rank]:.1f} %"
        times = (f"{timeline.busy[rank]:.6g}", f"{timeline.idle[rank]:.6g}", bubble, f"{peaks[rank]:.6g}")
        rows.append((str(rank), " ".join(map(str, stages)), *times))
    return f"{align_columns(rows, left=2)}\nstep {timeline.seconds:.6g}"


MOST_RANKS = 32


def expert_table(plan: Plan, *, experts: int) -> str:
    """Return a table with a line for each rank: its rows of the batch, tokens, experts, and its part of each matrix.

    The last column has the ranks that hold the same parameters, and sum the gradients; with `shards`, a bar between
    replicas of the shards. Raises ValueError while dp is auto, and for fewer experts than `ep`."""
    mesh = plan.mesh()
    if experts < plan.ep:
        raise ValueError(f"--experts is {experts}, but ep={plan.ep} needs {plan.ep} or more; give --experts {plan.ep}")
    inner = mesh.expand(["etp"])
    tokens = [axis for axis in mesh.expand((*plan.token_axes, *plan.tensor_axes)) if axis not in inner]
    table: list[tuple[str, ...]] = [("rank", "stage", "rows", "tokens", "experts", "inner", "same on ranks")]
    for rank in range(min(mesh.size, MOST_RANKS)):
        start, stop = even_split(experts, plan.ep)[mesh.index(rank, axis="ep")]
        holders = mesh.group(rank, axes=mesh.others(("pp", "ep", "etp")))
        groups = itertools.groupby(holders, key=lambda each: mesh.index(each, axis="outer"))
        same = " | ".join(" ".join(map(str, group)) for _, group in groups)
        places = (_place(mesh, rank, axes) for axes in (["pp"], plan.row_axes, tokens))
        held = str(start) if stop == start + 1 else f"{start}-{stop - 1}"
        table.append((str(rank), *places, held, _place(mesh, rank, inner), same))
    more = [f"… {mesh.size - MOST_RANKS} more ranks"] if mesh.size > MOST_RANKS else []
    return "\n".join([align_columns(table), *more])


def load_picture(loads: Sequence[Mapping[str, float]]) -> str:
    """Return a line for each mixture with its load over time, a bar for each of `loads`, and the last load.

    loads: at each time, tokens of the busiest expert over an even share, by mixture. Bars span 1 to the largest."""
    largest = max(max(each.values()) for each in loads)
    rows = [("mixture", f"load of the busiest expert, ▁ 1.00 to █ {largest:.2f}", "last")]
    for name in loads[-1]:
        heights = ((each.get(name, 1.0) - 1) / max(largest - 1, 1e-9) for each in loads)
        rows.append((name, "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * high))] for high in heights), f"{loads[-1][name]:.2f}"))
    return align_columns(rows)


def _place(mesh: Mesh, rank: int, axes: Iterable[str]) -> str:
    """Return the place of a rank among the ranks along `axes`, as in `2 of 4`; `all` for one rank."""
    group = mesh.group(rank, axes=tuple(axes))
    return f"{group.index(rank) + 1} of {len(group)}" if len(group) > 1 else "all"

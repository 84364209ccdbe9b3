"""Timelines as a picture: a bar for every computation, a row for every rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meshwise.bench.plot import require_matplotlib
from meshwise.pipeline.action import Kind
from meshwise.timeline import Stream, Timeline
from meshwise.view.schedule_text import label

COLORS: Mapping[Kind, str] = {Kind.F: "#7aa6e0", Kind.B: "#7fc28b", Kind.I: "#71c7c9", Kind.W: "#ecc95c"}
MEANINGS: Mapping[Kind, str] = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward, input",
    Kind.W: "backward, weights",
}
_BESIDE = "#777777"
_INCHES, _WIDEST = 0.32, 40.0


def plot_schedules(timelines: Mapping[str, Timeline], *, path: Path, form: str | None = None) -> None:
    """Write a picture, `form` png or svg (by default the suffix): a panel per schedule, all to one scale of time.

    A rank with several stages has every second one hatched. Raises MissingExtraError without matplotlib, and OSError
    when the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - of the extra `plot`
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `plot`

    longest = max(timeline.seconds for timeline in timelines.values())
    shortest = min(event.seconds for timeline in timelines.values() for row in timeline.computing for event in row)
    heights = [timeline.ranks + 1.6 for timeline in timelines.values()]
    size = (min(_WIDEST, 1.6 + _INCHES * longest / shortest), _INCHES * sum(heights) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (title, timeline) in zip(panels, timelines.items(), strict=True):
        _panel(panel, title, timeline)
    kinds = [kind for kind in COLORS if any(_uses(timeline, kind) for timeline in timelines.values())]
    patches = [panels[0].barh(0, 0, color=COLORS[kind], label=MEANINGS[kind]) for kind in kinds]
    if any(event.stream is Stream.COLLECTIVE for timeline in timelines.values() for event in timeline.events):
        patches.append(panels[0].barh(0, 0, color=_BESIDE, label="gathers and reductions"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize="small", frameon=False)
    figure.savefig(path, dpi=110, format=form)


def _uses(timeline: Timeline, kind: Kind) -> bool:
    return any(event.kind == kind for row in timeline.computing for event in row)


def _panel(panel, title: str, timeline: Timeline) -> None:  # type: ignore[no-untyped-def] # matplotlib's Axes, of an extra
    for rank, row in enumerate(timeline.computing):
        for event in row:
            width, kind = event.seconds, Kind(event.kind)
            hatch = "//" if timeline.stages[rank].index(event.stage) % 2 else None
            panel.barh(
                rank, width, left=event.start, height=0.86, color=COLORS[kind], edgecolor="white", lw=0.6, hatch=hatch
            )
            if timeline.seconds / width < 150:
                panel.text(
                    event.start + width / 2, rank, label(event, timeline=timeline), ha="center", va="center", fontsize=6
                )
    for event in timeline.events:
        if event.stream is Stream.COLLECTIVE:
            panel.barh(event.rank + 0.36, event.seconds, left=event.start, height=0.14, color=_BESIDE)
    mean = sum(timeline.bubbles) / timeline.ranks
    panel.set_title(f"{title}: step {timeline.seconds:.4g}, bubble {100 * mean:.1f} %", loc="left", fontsize="small")
    panel.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    panel.tick_params(labelsize="x-small", left=False)
    panel.set_ylim(timeline.ranks - 0.4, -0.6)
    panel.set_xlim(0)
    panel.spines[["top", "right", "left"]].set_visible(False)

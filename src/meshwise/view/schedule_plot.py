"""A timed schedule as a picture: a bar for every computation, a row for every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwise.bench.plot import require_matplotlib
from meshwise.pipeline.action import Kind
from meshwise.pipeline.clock import Timing
from meshwise.view.schedule_text import label

COLORS: Mapping[Kind, str] = {Kind.F: "#7aa6e0", Kind.B: "#7fc28b", Kind.I: "#71c7c9", Kind.W: "#ecc95c"}
MEANINGS: Mapping[Kind, str] = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward, input",
    Kind.W: "backward, weights",
}
_INCHES, _WIDEST = 0.32, 40.0


def plot_schedules(timings: Mapping[str, Timing], *, path: Path, form: str | None = None) -> None:
    """Write a picture, `form` png or svg (by default the suffix): a panel per schedule, all to one scale of time.

    A rank with several stages has every second one hatched. Raises MissingExtraError without matplotlib, and OSError
    when the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - of the extra `plot`
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `plot`

    longest = max(timing.seconds for timing in timings.values())
    shortest = min(event.end - event.start for timing in timings.values() for row in timing.computing for event in row)
    heights = [timing.schedule.ranks + 1.6 for timing in timings.values()]
    size = (min(_WIDEST, 1.6 + _INCHES * longest / shortest), _INCHES * sum(heights) + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timings), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (title, timing) in zip(panels, timings.items(), strict=True):
        _panel(panel, title, timing)
    kinds = [kind for kind in COLORS if any(_uses(timing, kind) for timing in timings.values())]
    patches = [panels[0].barh(0, 0, color=COLORS[kind], label=MEANINGS[kind]) for kind in kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(kinds), fontsize="small", frameon=False)
    figure.savefig(path, dpi=110, format=form)


def _uses(timing: Timing, kind: Kind) -> bool:
    return any(event.action.kind is kind for row in timing.computing for event in row)


def _panel(panel, title: str, timing: Timing) -> None:  # type: ignore[no-untyped-def] # matplotlib's Axes, of an extra
    own: Sequence[tuple[int, ...]] = [timing.schedule.stages_of(rank) for rank in range(timing.schedule.ranks)]
    for rank, row in enumerate(timing.computing):
        for event in row:
            width, kind = event.end - event.start, event.action.kind
            hatch = "//" if own[rank].index(event.action.stage) % 2 else None
            panel.barh(
                rank, width, left=event.start, height=0.86, color=COLORS[kind], edgecolor="white", lw=0.6, hatch=hatch
            )
            if timing.seconds / width < 150:
                panel.text(
                    event.start + width / 2, rank, label(event, timing=timing), ha="center", va="center", fontsize=6
                )
    mean = sum(timing.bubbles) / timing.schedule.ranks
    panel.set_title(f"{title}: step {timing.seconds:.4g}, bubble {100 * mean:.1f} %", loc="left", fontsize="small")
    panel.set_yticks(range(timing.schedule.ranks), [f"rank {rank}" for rank in range(timing.schedule.ranks)])
    panel.tick_params(labelsize="x-small", left=False)
    panel.set_ylim(timing.schedule.ranks - 0.4, -0.6)
    panel.set_xlim(0)
    panel.spines[["top", "right", "left"]].set_visible(False)

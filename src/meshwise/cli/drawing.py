"""Where a drawing goes: to the terminal, and into the files that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from meshwise.bench.plot import require_matplotlib
from meshwise.timeline import Timeline
from meshwise.view.chrome_trace import write_chrome_trace
from meshwise.view.schedule_plot import plot_schedules

_WIDTH = 120
"""Of the drawing where the output is not a terminal."""


@dataclass(frozen=True)
class Files:
    """The files to write."""

    png: Path | None = None
    """Draw a PNG; needs the extra `plot`."""

    svg: Path | None = None
    """Draw an SVG; needs the extra `plot`."""

    trace: Path | None = None
    """Write a Chrome trace, which ui.perfetto.dev opens; where times have no unit, one is a millisecond."""


def drawing_board() -> Console:
    """The terminal."""
    return Console() if Console().is_terminal else Console(width=_WIDTH)


def check(files: Files) -> None:
    """Raise MissingExtraError when a picture is asked for that cannot be drawn."""
    if files.png or files.svg:
        require_matplotlib()


def save(timelines: Mapping[str, Timeline], *, files: Files, seconds: float) -> None:
    """Write the files that are asked for, and say so; `seconds` is one unit of the timelines' times."""
    writers: list[tuple[Path | None, Callable[[Path], None]]] = [
        (files.png, lambda path: plot_schedules(timelines, path=path, form="png")),
        (files.svg, lambda path: plot_schedules(timelines, path=path, form="svg")),
        (files.trace, lambda path: write_chrome_trace(timelines, path=path, seconds=seconds)),
    ]
    for path, write in writers:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            drawing_board().print(f"wrote {path}", highlight=False, soft_wrap=True)

"""Outputs of a drawing: the terminal and the requested files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwise.bench.plot import MissingExtraError, require_matplotlib
from meshwise.cli.output_files import check_outputs, write_output
from meshwise.pipeline.run.measured_step import MeasuredStep
from meshwise.train.job import JobError
from meshwise.train.output_stream import OutputConsole, screen
from meshwise.train.run_folder import TIMELINE
from meshwise.view.chrome_trace import write_chrome_trace
from meshwise.view.page import write_page
from meshwise.view.picture import Picture
from meshwise.view.pictures import sheet
from meshwise.view.plan_account import PlanAccount
from meshwise.view.png import write_png
from meshwise.view.svg import svg_file

_WIDTH = 120
"""Of the drawing where the output is not a terminal."""


@dataclass(frozen=True)
class DrawingFiles:
    """The files to write."""

    html: Path | None = None
    """Write a page for a browser: tables and pictures that tell what is pointed at; it needs nothing else."""

    png: Path | None = None
    """Draw a PNG; needs the extra `plot`."""

    svg: Path | None = None
    """Draw an SVG."""

    trace: Path | None = None
    """Write a Chrome trace, which ui.perfetto.dev opens; where times have no unit, one is a millisecond."""

    @property
    def wanted(self) -> bool:
        """True if there is any to write."""
        return any((self.html, self.png, self.svg, self.trace))


def drawing_board() -> OutputConsole:
    """Return the terminal."""
    return screen(width=_WIDTH)


def check(files: DrawingFiles) -> None:
    """Raise JobError when a picture is asked for that cannot be drawn, or a file that cannot be written."""
    check_outputs((files.html, files.png, files.svg, files.trace))
    if files.png:
        try:
            require_matplotlib()
        except MissingExtraError as error:
            raise JobError(str(error)) from error


def read_step(run: Path) -> MeasuredStep:
    """Return the step that was measured of a run: its folder, or its timeline.json. Raises JobError when there is
    none.
    """
    path = run / TIMELINE if run.is_dir() else run
    try:
        return MeasuredStep.read(path)
    except FileNotFoundError:
        raise JobError(f"{path} is not there; train with --train.timeline=3 to measure three steps of a run") from None
    except (ValueError, OSError) as error:
        raise JobError(str(error)) from error


def save(accounts: Sequence[PlanAccount], *, files: DrawingFiles, title: str) -> None:
    """Write the files that are asked for, and say so. Raises JobError when one cannot be written."""
    _write(files.html, lambda path: write_page(accounts, path=path, title=title))
    _write(files.trace, lambda path: write_chrome_trace(accounts, path=path))
    if files.png or files.svg:
        save_picture(sheet(accounts), png=files.png, svg=files.svg)


def save_picture(picture: Picture, *, png: Path | None, svg: Path | None) -> None:
    """Write a picture as what is asked for, and say so. Raises JobError when it cannot be written."""
    _write(png, lambda path: write_png(picture, path=path))
    _write(svg, lambda path: path.write_text(svg_file(picture), encoding="utf-8"))


def _write(path: Path | None, write: Callable[[Path], object]) -> None:
    if path is not None:
        try:
            write_output(path, write=write)
        except MissingExtraError as error:
            raise JobError(f"cannot write {path}: {error}") from error
        drawing_board().print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)

"""Files that a command writes, pictures included: refused before the work starts, then replaced whole or not at all.

`check_outputs` and `check_drawings` run first; `write_and_say`, `write_drawings` and `write_picture` write;
`read_step` reads the measured step of a run that a drawing shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwise.base.atomic_file import is_read_only, write_whole
from meshwise.bench.plot import MissingExtraError, require_matplotlib
from meshwise.pipeline.run.measured_step import MeasuredStep
from meshwise.train.job import JobError
from meshwise.train.output_stream import OutputConsole, console_of_width
from meshwise.train.run_folder import TIMELINE
from meshwise.view.chrome_trace import write_chrome_trace
from meshwise.view.page import write_page
from meshwise.view.picture import Picture
from meshwise.view.pictures import sheet
from meshwise.view.plan_account import PlanAccount
from meshwise.view.png import write_png
from meshwise.view.svg import svg_file

_WIDTH = 120
"""Columns of a drawing where stdout is not a terminal."""


def check_outputs(paths: Iterable[Path | None]) -> None:
    """Raise JobError for a path that cannot be written, or that is named twice."""
    given: set[Path] = set()
    for path in filter(None, paths):
        place = path.resolve()
        if path.is_dir():
            raise JobError(f"cannot write {path}: it is a folder; name a file in it")
        folder = next(parent for parent in place.parents if parent.exists())
        if not folder.is_dir():
            raise JobError(f"cannot write {path}: {folder} is a file, not a folder; name another path")
        if not os.access(folder, os.W_OK) and not os.access(place, os.W_OK):
            raise JobError(f"cannot write {path}: no permission to write to it or to {folder}; name another path")
        if is_read_only(path):
            raise JobError(f"cannot write {path}: it is read-only; name another file, or allow it to be written")
        if place in given and (place.is_file() or not place.exists()):
            raise JobError(f"{path} is named twice, and the second output would replace the first; name two files")
        given.add(place)


def write_output(path: Path, *, write: Callable[[Path], object]) -> None:
    """Let `write` write the file, and make its folders. Raises JobError, with the old file unchanged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write=write)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
    except MissingExtraError as error:
        raise JobError(f"cannot write {path}: {error}") from error


def write_and_say(path: Path | None, *, write: Callable[[Path], object], more: str = "") -> None:
    """Write a file as `write_output` does and print its path, followed by `more`; None: do nothing."""
    if path is not None:
        write_output(path, write=write)
        drawing_console().print(f"wrote {path}{more}", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class DrawingFiles:
    """The picture files that a command can write."""

    html: Path | None = None
    """Write a page for a browser: tables, and pictures that show details under the pointer; it needs nothing else."""
    png: Path | None = None
    """Draw a PNG; needs the extra `plot`."""
    svg: Path | None = None
    """Draw an SVG."""
    trace: Path | None = None
    """Write a Chrome trace, which ui.perfetto.dev opens; where times have no unit, one is a millisecond."""

    @property
    def wanted(self) -> bool:
        """True if any file is to be written."""
        return any((self.html, self.png, self.svg, self.trace))


def drawing_console() -> OutputConsole:
    """Return the console for drawings."""
    return console_of_width(_WIDTH)


def check_drawings(files: DrawingFiles) -> None:
    """Raise JobError for a file that cannot be written, and for a PNG without matplotlib."""
    check_outputs((files.html, files.png, files.svg, files.trace))
    if files.png:
        try:
            require_matplotlib()
        except MissingExtraError as error:
            raise JobError(str(error)) from error


def read_step(run: Path) -> MeasuredStep:
    """Return the measured step of a run, given its folder or its timeline.json. Raises JobError without one."""
    path = run / TIMELINE if run.is_dir() else run
    try:
        return MeasuredStep.read(path)
    except FileNotFoundError:
        raise JobError(f"{path} is not there; train with --train.timeline=3 to measure three steps of a run") from None
    except (ValueError, OSError) as error:
        raise JobError(str(error)) from error


def write_drawings(accounts: Sequence[PlanAccount], *, files: DrawingFiles, title: str) -> None:
    """Write the files asked for and print their paths. Raises JobError."""
    write_and_say(files.html, write=lambda path: write_page(accounts, path=path, title=title))
    write_and_say(files.trace, write=lambda path: write_chrome_trace(accounts, path=path))
    if files.png or files.svg:
        write_picture(sheet(accounts), png=files.png, svg=files.svg)


def write_picture(picture: Picture, *, png: Path | None, svg: Path | None) -> None:
    """Write a picture in the formats asked for and print the paths. Raises JobError."""
    write_and_say(png, write=lambda path: write_png(picture, path=path))
    write_and_say(svg, write=lambda path: path.write_text(svg_file(picture), encoding="utf-8"))

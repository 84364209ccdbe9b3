"""Write the output files of a command: pictures (PNG, SVG), HTML pages, Chrome traces and other files.

A command first calls `check_outputs` or `check_drawings`, which refuse a path that cannot be written. After the work,
`write_and_say`, `write_drawings` and `write_picture` write the files: each file is replaced whole or not at all.
`read_step` reads the measured step that a drawing shows."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from meshwise.base.atomic_file import is_read_only, write_whole
from meshwise.bench.collective_benchmark import MissingExtraError, require_matplotlib
from meshwise.pipeline.run.measured_step import MeasuredStep
from meshwise.train.console_output import OutputConsole, console_of_width
from meshwise.train.job import JobError
from meshwise.train.run_folder import TIMELINE
from meshwise.view.chrome_trace import write_chrome_trace
from meshwise.view.palette import COLORS, UNSEEN, style
from meshwise.view.plan_account import PlanAccount
from meshwise.view.plan_comparison import Row, comparison_table
from meshwise.view.plan_pictures import picture_sheet, pictures
from meshwise.view.shapes import Bars, Picture, PictureText, Shape
from meshwise.view.svg import svg, svg_file

_WIDTH = 120
"""Columns of a drawing where stdout is not a terminal."""


def check_outputs(paths: Iterable[Path | None]) -> None:
    """Raise JobError for a path that cannot be written; None is skipped. Commands call it before their work starts."""
    for path in filter(None, paths):
        if path.is_dir():
            raise JobError(f"cannot write {path}: it is a folder; name a file in it")
        folder = next(parent for parent in path.resolve().parents if parent.exists())
        if is_read_only(path) or not (folder.is_dir() and (path.exists() or os.access(folder, os.W_OK))):
            raise JobError(f"cannot write {path}: no permission to write to it or to {folder}; name another path")


def write_and_say(path: Path | None, *, write: Callable[[Path], object], more: str = "") -> None:
    """Make the folders of `path`, let `write` write the file, and print the path followed by `more`.

    Does nothing if `path` is None. Raises JobError; an old file is then unchanged."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write=write)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
    except MissingExtraError as error:
        raise JobError(f"cannot write {path}: {error}") from error
    drawing_console().print(f"wrote {path}{more}", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class DrawingFiles:
    """Flags for the picture files that a command can write."""

    html: Path | None = None
    """Write an HTML page here: tables, and pictures that show details under the pointer. It loads no other files."""
    png: Path | None = None
    """Write a PNG here; needs the extra `plot`."""
    svg: Path | None = None
    """Write an SVG here."""
    trace: Path | None = None
    """Write a Chrome trace here, which ui.perfetto.dev opens. Times without a unit are written as milliseconds."""

    @property
    def wanted(self) -> bool:
        """True if any file is to be written."""
        return any((self.html, self.png, self.svg, self.trace))


def drawing_console() -> OutputConsole:
    """Return a console on stdout for drawings; where stdout is no terminal, its lines have at most 120 columns."""
    return console_of_width(_WIDTH)


def check_drawings(files: DrawingFiles) -> None:
    """Raise JobError for a file that cannot be written, and for a PNG when matplotlib is not installed."""
    check_outputs((files.html, files.png, files.svg, files.trace))
    if files.png:
        try:
            require_matplotlib()
        except MissingExtraError as error:
            raise JobError(str(error)) from error


def read_step(run: Path) -> MeasuredStep:
    """Return the measured step of a run, given its folder or timeline.json. Raises JobError if it cannot be read."""
    path = run / TIMELINE if run.is_dir() else run
    try:
        return MeasuredStep.read(path)
    except FileNotFoundError:
        raise JobError(f"{path} is not there; train with --train.timeline=3 to measure three steps of a run") from None
    except (ValueError, OSError) as error:
        raise JobError(str(error)) from error


def write_drawings(accounts: Sequence[PlanAccount], *, files: DrawingFiles, title: str) -> None:
    """Draw the plans (`accounts`) into the files that are not None, and print the paths. Raises JobError."""
    write_and_say(files.html, write=lambda path: path.write_text(page(accounts, title=title), encoding="utf-8"))
    write_and_say(files.trace, write=lambda path: write_chrome_trace(accounts, path=path))
    if files.png or files.svg:
        write_picture(picture_sheet(accounts), png=files.png, svg=files.svg)


def write_picture(picture: Picture, *, png: Path | None, svg: Path | None) -> None:
    """Write a picture to the paths that are not None, and print them. Raises JobError when a file cannot be written."""
    write_and_say(png, write=lambda path: write_png(picture, path=path))
    write_and_say(svg, write=lambda path: path.write_text(svg_file(picture), encoding="utf-8"))


_DOTS = 100
"""Picture units in an inch of the PNG."""

_SHARPNESS = 1.6
"""Pixels of the PNG in a picture unit."""

_POINTS = 72 / _DOTS
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}.get


def write_png(picture: Picture, *, path: Path) -> None:
    """Write a picture as a PNG. Raises MissingExtraError without matplotlib, OSError when it cannot be written."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - of the extra `plot`
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `plot`

    figure = Figure(figsize=(picture.width / _DOTS, picture.height / _DOTS), facecolor=COLORS["ground"][0])
    FigureCanvasAgg(figure)
    sheet = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))
    sheet.set_axis_off()
    for order, shape in enumerate(picture.flat()):
        if shape.paint != UNSEEN:
            _paint(sheet, shape, {"color": COLORS[shape.paint][0], "zorder": order})
    figure.savefig(path, dpi=_DOTS * _SHARPNESS, format="png")


def _paint(sheet, shape: Shape, how: dict[str, Any]) -> None:  # type: ignore[no-untyped-def] # matplotlib's Axes, of an extra
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 - of the extra `plot`

    if isinstance(shape, PictureText):
        place = {"ha": _ANCHORS(shape.anchor), "va": "center_baseline"}
        sheet.text(shape.x, shape.y, shape.text, fontsize=shape.size * _POINTS, parse_math=False, **place, **how)
    elif isinstance(shape, Bars):
        corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in shape.boxes]
        sheet.add_collection(
            PolyCollection(corners, linewidths=0 if shape.fine else 0.3, **how | {"edgecolor": COLORS["ground"][0]})
        )
    elif shape.filled:
        sheet.add_collection(PolyCollection([shape.points], linewidths=0, **how))
    else:
        across, down = zip(*shape.points, strict=True)
        sheet.plot(across, down, linewidth=0.8, linestyle="--" if shape.paint == "limit" else "-", **how)


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Content-Security-Policy of the page: the browser loads nothing from other places, even if a title contains HTML."""


def page(accounts: Sequence[PlanAccount], *, title: str) -> str:
    """Return an HTML page about some plans: a table of them, then pictures of each plan in one time scale."""
    table = html_table(comparison_table(accounts))
    body = f'<h1>{escape(title)}</h1><section id="overview"><div class="wide">{table}</div></section>'
    for number, (account, drawn) in enumerate(zip(accounts, pictures(accounts), strict=True), start=1):
        figures = "".join(f"<figure>{svg(picture)}</figure>" for picture in drawn)
        body += f'<section class="plan" id="plan-{number}"><h2>{escape(account.title)}</h2>{figures}</section>'
    return html_document(body, title=title)


def html_document(body: str, *, title: str) -> str:
    """Return an HTML page with the HTML text `body`, which loads no other files."""
    name, files = escape(title), resources.files("meshwise.view")
    head = (
        f'<meta charset="utf-8"><title>{name}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style()}{files.joinpath('page.css').read_text(encoding='utf-8')}</style>"
    )
    script = f"<script>{files.joinpath('page.js').read_text(encoding='utf-8')}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{body}</main>{script}</body></html>\n'


def html_table(rows: Sequence[Row]) -> str:
    """Return an HTML table. The first row holds the titles of the columns, the first column the titles of the rows."""
    titles = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    lines = (
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows[1:]
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

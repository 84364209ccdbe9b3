"""Represent a picture as a value: shapes in drawing order (`Picture`), and write it as SVG, PNG or in a page.

Pages, files and tests then have the same content. Lengths are pixels; y points down. `stacked`, `legend`, `ticks` and
`text_width` help to arrange shapes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

from meshwise.base.package_table import package_table

_FILES = resources.files("meshwise.view")
COLORS: Mapping[str, tuple[str, str]] = package_table("view/colors.toml")
"""Colours (on a light, on a dark screen) by paint: a paint is the name of a colour. `UNSEEN` has none."""
UNSEEN = "gap"
"""Paint of invisible bars, which show their name when pointed at."""
_LINES = ("faint", "grid", "ink", "limit")


def style() -> str:
    """Return the CSS of all paints: a class for each, with variables for its light and its dark colour."""
    light = "".join(f"--{paint}:{colors[0]};" for paint, colors in COLORS.items())
    dark = "".join(f"--{paint}:{colors[1]};" for paint, colors in COLORS.items())
    fills = "".join(f".picture .{paint}{{fill:var(--{paint})}}" for paint in COLORS)
    lines = "".join(f".picture .line.{paint}{{fill:none;stroke:var(--{paint})}}" for paint in _LINES)
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f"{fills}\n{lines}\n"
        f"{_FILES.joinpath('picture.css').read_text(encoding='utf-8')}"
    )


Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, width and height of a rectangle."""


@dataclass(frozen=True)
class Bars:
    """Rectangles of one paint. `names`: text of each rectangle when pointed at; empty for none."""

    paint: str
    boxes: tuple[Box, ...]
    names: tuple[str, ...] = ()
    row: str = ""
    """Name of the row with these rectangles, shown before their names."""

    @property
    def fine(self) -> bool:
        """True if the rectangles are too narrow for a line around each."""
        return sum(width for _, _, width, _ in self.boxes) < 3 * len(self.boxes)


@dataclass(frozen=True)
class PicturePath:
    """A line through points; if `filled`, the area that it encloses."""

    paint: str
    points: tuple[tuple[float, float], ...]
    filled: bool = False


@dataclass(frozen=True)
class PictureText:
    """A line of text."""

    text: str
    x: float
    y: float
    """Middle of the line of text."""
    paint: str = "ink"
    size: float = 12
    anchor: str = "start"
    """Part of the text that is at x: `start`, `middle` or `end`."""


Shape: TypeAlias = Bars | PicturePath | PictureText


def moved(shape: Shape, *, right: float, down: float) -> Shape:
    """Return the shape moved right and down."""
    if isinstance(shape, PictureText):
        return replace(shape, x=shape.x + right, y=shape.y + down)
    if isinstance(shape, PicturePath):
        return replace(shape, points=tuple((x + right, y + down) for x, y in shape.points))
    return replace(shape, boxes=tuple((x + right, y + down, width, height) for x, y, width, height in shape.boxes))


@dataclass(frozen=True)
class Plot:
    """Part of a picture in which x is time, from 0 on. Coordinates of its shapes count from its top left corner."""

    left: float
    top: float
    width: float
    height: float
    span: float
    """Time of the whole `width`."""
    unit: str
    """`s`; empty for times without a unit."""
    shapes: tuple[Shape, ...]
    axis: tuple[Shape, ...] = ()
    """Lines and texts of round times, drawn below the shapes. A page replaces axis and texts when it stretches time."""
    texts: tuple[PictureText, ...] = ()
    """Names of shapes, drawn over the shapes where there is room."""
    brief: bool = False
    """True if `texts` leave out the stage, as in `F0` for the action `0F0`."""

    def x(self, time: float) -> float:
        """Return the x coordinate of a time."""
        return self.width * time / self.span


@dataclass(frozen=True)
class Picture:
    """A picture: shapes, then the plot if there is one."""

    title: str
    """Description for screen readers."""
    width: float
    height: float
    shapes: tuple[Shape, ...]
    plot: Plot | None = None

    def flat(self) -> Iterator[Shape]:
        """Yield all shapes in drawing order, also from the plot, with coordinates of the picture."""
        yield from self.shapes
        if self.plot is not None:
            for shape in (*self.plot.axis, *self.plot.shapes, *self.plot.texts):
                yield moved(shape, right=self.plot.left, down=self.plot.top)


def stacked(pictures: Sequence[Picture], *, gap: float = 14) -> Picture:
    """Return one picture with the given pictures below one another, with margins of `gap` pixels."""
    shapes: list[Shape] = []
    top = gap
    for picture in pictures:
        shapes += (moved(shape, right=gap, down=top) for shape in picture.flat())
        top += picture.height + gap
    width = 2 * gap + max(picture.width for picture in pictures)
    return Picture("; ".join(picture.title for picture in pictures), width, top, tuple(shapes))


def text_width(text: str, *, size: float) -> float:
    """Return the approximate width of a text in pixels. `size`: the font size."""
    return 0.6 * size * len(text)


def ticks(span: float, *, most: int) -> list[float]:
    """Return evenly spaced numbers from 0 to `span`, in at most `most` steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)
    return [step * index for index in range(math.floor(span / step * (1 + 1e-9)) + 1)]


def legend(entries: Sequence[tuple[str, str]], *, x: float, y: float) -> Iterator[Shape]:
    """Yield the shapes of a legend in one row, which begins at x. `entries`: (paint, meaning)."""
    for paint, meaning in entries:
        yield Bars(paint, ((x, y - 5, 14, 10),))
        yield PictureText(meaning, x + 19, y, "faint", size=11)
        x += 19 + text_width(meaning, size=11) + 16


def svg_file(picture: Picture) -> str:
    """Return the text of an SVG file, which has its own CSS and background."""
    ground = f'<rect class="ground" width="{_number(picture.width)}" height="{_number(picture.height)}"/>'
    return svg(picture, before=f"<style>{style()}</style>{ground}")


def svg(picture: Picture, *, before: str = "") -> str:
    """Return an SVG element for an HTML page that has the CSS of `style`. `before`: elements to draw first, as text.

    A page shows a wide picture at least 720 pixels wide."""
    width, height = _number(picture.width), _number(picture.height)
    inside = before + "".join(map(_shape, picture.shapes)) + (_plot(picture.plot) if picture.plot else "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {width} {height}" width="{width}" '
        f'style="min-width:{_number(min(picture.width, 720))}px" role="img" '
        f'aria-label="{escape(picture.title)}">{inside}</svg>'
    )


def _plot(plot: Plot) -> str:
    """Return a nested SVG element. A page stretches time by changing this element's view box."""
    left, top, width, height = map(_number, (plot.left, plot.top, plot.width, plot.height))
    place = f'transform="translate({left} {top})"'
    about = f'data-span="{plot.span!r}" data-unit="{plot.unit}"{" data-brief" * plot.brief}'
    return (
        f'<g class="axis" {place}>{"".join(map(_shape, plot.axis))}</g>'
        f'<svg class="plot" x="{left}" y="{top}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'preserveAspectRatio="none" {about}>{"".join(map(_shape, plot.shapes))}</svg>'
        f'<g class="texts" {place}>{"".join(map(_shape, plot.texts))}</g>'
    )


def _shape(shape: Shape) -> str:
    if isinstance(shape, PictureText):
        place = f'x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{_number(shape.size)}"'
        return f'<text class="{shape.paint}" {place} text-anchor="{shape.anchor}">{escape(shape.text)}</text>'
    if isinstance(shape, PicturePath):
        points = "L".join(f"{_number(x)} {_number(y)}" for x, y in shape.points)
        return f'<path class="{"area" if shape.filled else "line"} {shape.paint}" d="M{points}{"z" * shape.filled}"/>'
    names = f' data-row="{escape(shape.row)}" data-names="{escape("|".join(shape.names))}"' if shape.names else ""
    boxes = (map(_number, box) for box in shape.boxes)
    outline = "".join(f"M{x} {y}h{width}v{height}h-{width}z" for x, y, width, height in boxes)
    return f'<path class="bars{" fine" * shape.fine} {shape.paint}" d="{outline}"{names}/>'


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


_DOTS = 100
"""Picture units in an inch of the PNG."""
_POINTS = 72 / _DOTS
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}.get


def write_png(picture: Picture, *, path: Path) -> None:
    """Write a picture as a PNG. Raises ImportError without matplotlib, OSError when it cannot be written."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `plot`

    figure = Figure(figsize=(picture.width / _DOTS, picture.height / _DOTS), facecolor=COLORS["ground"][0])
    sheet = figure.add_axes((0, 0, 1, 1), xlim=(0, picture.width), ylim=(picture.height, 0))
    sheet.set_axis_off()
    for order, shape in enumerate(picture.flat()):
        if shape.paint != UNSEEN:
            _paint(sheet, shape, {"color": COLORS[shape.paint][0], "zorder": order})
    figure.savefig(path, dpi=1.6 * _DOTS, format="png")  # 1.6 pixels in a picture unit


def _paint(sheet, shape: Shape, how: dict[str, Any]) -> None:  # type: ignore[no-untyped-def] # matplotlib's Axes, of an extra
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 - of the extra `plot`

    if isinstance(shape, PictureText):
        place = {"ha": _ANCHORS(shape.anchor), "va": "center_baseline"}
        sheet.text(shape.x, shape.y, shape.text, fontsize=shape.size * _POINTS, parse_math=False, **place, **how)
    elif isinstance(shape, Bars):
        corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in shape.boxes]
        lines = {"linewidths": 0 if shape.fine else 0.3, "edgecolor": COLORS["ground"][0]}
        sheet.add_collection(PolyCollection(corners, **how | lines))
    elif shape.filled:
        sheet.add_collection(PolyCollection([shape.points], linewidths=0, **how))
    else:
        across, down = zip(*shape.points, strict=True)
        sheet.plot(across, down, linewidth=0.8, linestyle="--" if shape.paint == "limit" else "-", **how)


def html_document(body: str, *, title: str) -> str:
    """Return an HTML page with the HTML text `body`, which loads no other files."""
    page, css, script = (_FILES.joinpath(f"page.{end}").read_text(encoding="utf-8") for end in ("html", "css", "js"))
    return Template(page).substitute(title=escape(title), style=style() + css, body=body, script=script)


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table. The first row holds the titles of the columns, the first column the titles of the rows."""
    titles = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    lines = (
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows[1:]
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"

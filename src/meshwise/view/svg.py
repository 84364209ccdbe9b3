"""Convert a picture to SVG text: an element of a page (`svg`), or a whole file (`svg_file`)."""

from collections.abc import Iterable, Sequence
from html import escape

from meshwise.view.palette import style
from meshwise.view.shapes import Bars, Box, Picture, PicturePath, PictureText, Plot, Shape

_LEGIBLE = 720.0
"""Least width in pixels at which a page shows a wide picture."""


def svg_file(picture: Picture) -> str:
    """Return the text of an SVG file, which has its own CSS and background."""
    return _svg(picture, f"<style>{style()}</style>" + _ground(picture))


def svg(picture: Picture) -> str:
    """Return an SVG element for an HTML page; the page has the CSS of `palette.style()`."""
    return _svg(picture, "")


def _svg(picture: Picture, before: str) -> str:
    width, height = _number(picture.width), _number(picture.height)
    inside = before + _shapes(picture.shapes) + (_plot(picture.plot) if picture.plot else "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {width} {height}" width="{width}" '
        f'style="min-width:{_number(min(picture.width, _LEGIBLE))}px" role="img" '
        f'aria-label="{escape(picture.title)}">{inside}</svg>'
    )


def _ground(picture: Picture) -> str:
    return f'<rect class="ground" width="{_number(picture.width)}" height="{_number(picture.height)}"/>'


def _plot(plot: Plot) -> str:
    """Return a nested SVG element. A page stretches time by changing this element's view box."""
    left, top, width, height = map(_number, (plot.left, plot.top, plot.width, plot.height))
    place = f'transform="translate({left} {top})"'
    about = f'data-span="{plot.span!r}" data-unit="{plot.unit}"{" data-brief" * plot.brief}'
    return (
        f'<g class="axis" {place}>{_shapes(plot.axis)}</g>'
        f'<svg class="plot" x="{left}" y="{top}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'preserveAspectRatio="none" {about}>{_shapes(plot.shapes)}</svg>'
        f'<g class="texts" {place}>{_shapes(plot.texts)}</g>'
    )


def _shapes(shapes: Iterable[Shape]) -> str:
    return "".join(map(_shape, shapes))


def _shape(shape: Shape) -> str:
    if isinstance(shape, PictureText):
        place = f'x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{_number(shape.size)}"'
        return f'<text class="{shape.paint}" {place} text-anchor="{shape.anchor}">{escape(shape.text)}</text>'
    if isinstance(shape, PicturePath):
        points = "L".join(f"{_number(x)} {_number(y)}" for x, y in shape.points)
        return f'<path class="{"area" if shape.filled else "line"} {shape.paint}" d="M{points}{"z" * shape.filled}"/>'
    return _bars(shape)


def _bars(bars: Bars) -> str:
    names = ""
    if bars.names:
        names = f' data-row="{escape(bars.row)}" data-names="{escape("|".join(bars.names))}"'
    return f'<path class="bars{" fine" * bars.fine} {bars.paint}" d="{_outline(bars.boxes)}"{names}/>'


def _outline(boxes: Sequence[Box]) -> str:
    parts = []
    for x, y, width, height in boxes:
        wide = _number(width)
        parts.append(f"M{_number(x)} {_number(y)}h{wide}v{_number(height)}h-{wide}z")
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")

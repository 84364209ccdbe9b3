"""Convert a picture to SVG text: an element of a page (`svg`), or a whole file (`svg_file`)."""

from collections.abc import Iterable
from html import escape

from meshwise.view.palette import style
from meshwise.view.shapes import Picture, PicturePath, PictureText, Plot, Shape

_LEGIBLE = 720.0
"""Least width in pixels at which a page shows a wide picture."""


def svg_file(picture: Picture) -> str:
    """Return the text of an SVG file, which has its own CSS and background."""
    ground = f'<rect class="ground" width="{_number(picture.width)}" height="{_number(picture.height)}"/>'
    return svg(picture, before=f"<style>{style()}</style>{ground}")


def svg(picture: Picture, *, before: str = "") -> str:
    """Return an SVG element for an HTML page, which has the CSS of `palette.style()`. `before`: its first elements."""
    width, height = _number(picture.width), _number(picture.height)
    inside = before + _shapes(picture.shapes) + (_plot(picture.plot) if picture.plot else "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {width} {height}" width="{width}" '
        f'style="min-width:{_number(min(picture.width, _LEGIBLE))}px" role="img" '
        f'aria-label="{escape(picture.title)}">{inside}</svg>'
    )


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
    names = ""
    if shape.names:
        names = f' data-row="{escape(shape.row)}" data-names="{escape("|".join(shape.names))}"'
    outline = []
    for x, y, width, height in shape.boxes:
        wide = _number(width)
        outline.append(f"M{_number(x)} {_number(y)}h{wide}v{_number(height)}h-{wide}z")
    return f'<path class="bars{" fine" * shape.fine} {shape.paint}" d="{"".join(outline)}"{names}/>'


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")

"""Represent a picture as a value: shapes in drawing order (`Picture`), from which SVG and PNG are written.

So page, files and tests have equal content. A paint names a colour of `palette`. Lengths are pixels; y points down."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, width and height of a rectangle."""
Point: TypeAlias = tuple[float, float]
"""x and y."""
LETTER = 0.6
"""Approximate width of a letter, as a multiple of the font size."""
_NARROW = 3.0


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
        return sum(width for _, _, width, _ in self.boxes) < _NARROW * len(self.boxes)

    def moved(self, *, right: float, down: float) -> "Bars":
        """Return the shape moved right and down."""
        boxes = tuple((x + right, y + down, width, height) for x, y, width, height in self.boxes)
        return dataclasses.replace(self, boxes=boxes)


@dataclass(frozen=True)
class PicturePath:
    """A line through points; if `filled`, the area that it encloses."""

    paint: str
    points: tuple[Point, ...]
    filled: bool = False

    def moved(self, *, right: float, down: float) -> "PicturePath":
        """Return the shape moved right and down."""
        return dataclasses.replace(self, points=tuple((x + right, y + down) for x, y in self.points))


@dataclass(frozen=True)
class PictureText:
    """A line of text."""

    text: str
    x: float
    y: float
    """Middle of the line of text."""
    paint: str = "ink"
    size: float = 12
    """Font size."""
    anchor: str = "start"
    """Part of the text that is at x: `start`, `middle` or `end`."""

    def moved(self, *, right: float, down: float) -> "PictureText":
        """Return the shape moved right and down."""
        return dataclasses.replace(self, x=self.x + right, y=self.y + down)


Shape: TypeAlias = Bars | PicturePath | PictureText
"""Part of a picture."""


@dataclass(frozen=True)
class Plot:
    """Part of a picture in which x is time, from 0 on. Its shapes have coordinates from its own left top corner."""

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
                yield shape.moved(right=self.plot.left, down=self.plot.top)


def stacked(pictures: Sequence[Picture], *, gap: float = 14) -> Picture:
    """Return one picture with the given pictures below one another, with margins of `gap` pixels."""
    shapes: list[Shape] = []
    top = gap
    for picture in pictures:
        shapes += (shape.moved(right=gap, down=top) for shape in picture.flat())
        top += picture.height + gap
    width = 2 * gap + max(picture.width for picture in pictures)
    return Picture("; ".join(picture.title for picture in pictures), width, top, tuple(shapes))


def text_width(text: str, *, size: float) -> float:
    """Return the approximate width of a text in pixels. `size`: the font size."""
    return LETTER * size * len(text)


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

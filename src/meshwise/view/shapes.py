"""Represent pictures as values: shapes in order, from which SVG and PNG are written.

The content is decided once, for the page, the files and the tests; `palette` has the light and dark colours. Lengths
are pixels, y goes down.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, width, height."""

Point: TypeAlias = tuple[float, float]

LETTER = 0.6
"""Width of a letter, in sizes of the text."""

_NARROW = 3.0


@dataclass(frozen=True)
class Bars:
    """Rectangles of one paint. Named rectangles show their name when pointed at."""

    paint: str
    boxes: tuple[Box, ...]
    names: tuple[str, ...] = ()
    row: str = ""
    """Row that they belong to, shown with their names."""

    @property
    def fine(self) -> bool:
        """True if they are too narrow for a line around each."""
        return sum(width for _, _, width, _ in self.boxes) < _NARROW * len(self.boxes)

    def moved(self, *, right: float, down: float) -> "Bars":
        """Return the shape moved right and down."""
        boxes = tuple((x + right, y + down, width, height) for x, y, width, height in self.boxes)
        return dataclasses.replace(self, boxes=boxes)


@dataclass(frozen=True)
class PicturePath:
    """A line through points, or what it encloses."""

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
    """Of its middle."""
    paint: str = "ink"
    size: float = 12
    anchor: str = "start"
    """Which part of it is at x: start, middle or end."""

    def moved(self, *, right: float, down: float) -> "PictureText":
        """Return the shape moved right and down."""
        return dataclasses.replace(self, x=self.x + right, y=self.y + down)


Shape: TypeAlias = Bars | PicturePath | PictureText


@dataclass(frozen=True)
class Plot:
    """Part of a picture in which x is time from 0 on; its shapes are placed from its own corner."""

    left: float
    top: float
    width: float
    height: float
    span: float
    """The time that `width` stands for."""
    unit: str
    """`s`, or nothing for times that have no unit."""
    shapes: tuple[Shape, ...]
    axis: tuple[Shape, ...] = ()
    """Drawn below the shapes: round times. It is drawn anew when a reader stretches time, as are the texts."""
    texts: tuple[PictureText, ...] = ()
    """Drawn over the shapes: their names, where there is room."""
    brief: bool = False
    """Whether these leave out the stage: `F0` for what is called `0F0`."""

    def x(self, time: float) -> float:
        """Return the x coordinate of a time."""
        return self.width * time / self.span


@dataclass(frozen=True)
class Picture:
    """Sheet of shapes, with or without a plot."""

    title: str
    """What it shows, for those who cannot see it."""
    width: float
    height: float
    shapes: tuple[Shape, ...]
    plot: Plot | None = None

    def flat(self) -> Iterator[Shape]:
        """Yield all shapes in place."""
        yield from self.shapes
        if self.plot is not None:
            for shape in (*self.plot.axis, *self.plot.shapes, *self.plot.texts):
                yield shape.moved(right=self.plot.left, down=self.plot.top)


def stacked(pictures: Sequence[Picture], *, gap: float = 14) -> Picture:
    """Return pictures below one another as one picture with a margin."""
    shapes: list[Shape] = []
    top = gap
    for picture in pictures:
        shapes += (shape.moved(right=gap, down=top) for shape in picture.flat())
        top += picture.height + gap
    width = 2 * gap + max(picture.width for picture in pictures)
    return Picture("; ".join(picture.title for picture in pictures), width, top, tuple(shapes))


def text_width(text: str, *, size: float) -> float:
    """Return the approximate width of a text."""
    return LETTER * size * len(text)


def ticks(span: float, *, most: int) -> list[float]:
    """Return round numbers from 0 to `span` in at most `most` steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)
    return [step * index for index in range(math.floor(span / step * (1 + 1e-9)) + 1)]


def legend(entries: Sequence[tuple[str, str]], *, x: float, y: float) -> Iterator[Shape]:
    """Yield a row of (paint, meaning)."""
    for paint, meaning in entries:
        yield Bars(paint, ((x, y - 5, 14, 10),))
        yield PictureText(meaning, x + 19, y, "faint", size=11)
        x += 19 + text_width(meaning, size=11) + 16

"""A picture as a PNG, painted by matplotlib."""

from __future__ import annotations

from pathlib import Path as File
from typing import Any

from meshwise.bench.plot import require_matplotlib
from meshwise.view.palette import COLORS, UNSEEN
from meshwise.view.picture import Bars, Picture, PictureText, Shape

_DOTS = 100
"""Pixels of a picture in an inch."""

_SHARPNESS = 1.6
"""Pixels of the file for each of the picture."""

_POINTS = 72 / _DOTS
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}.get


def write_png(picture: Picture, *, path: File) -> None:
    """Write it. Raises MissingExtraError without matplotlib, and OSError when the file cannot be written."""
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

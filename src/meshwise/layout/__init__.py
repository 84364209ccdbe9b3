"""Layouts: where a tensor lives on a mesh, as arithmetic on tuples."""

from meshwise.layout.layout import DimSplit, Layout
from meshwise.layout.rectangles import Rectangle, rectangles

__all__ = [
    "DimSplit",
    "Layout",
    "Rectangle",
    "rectangles",
]

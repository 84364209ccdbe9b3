"""Layouts: where a tensor lives on a mesh, as arithmetic on tuples."""

from meshwise.layout.layout import DimSplit, Layout
from meshwise.layout.rectangles import Rectangle, even_split, rectangles

__all__ = [
    "DimSplit",
    "Layout",
    "Rectangle",
    "even_split",
    "rectangles",
]

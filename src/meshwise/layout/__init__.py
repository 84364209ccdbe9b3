"""Layouts: the part of a tensor that each rank of a mesh stores, computed without tensors."""

from meshwise.layout.layout import DimSplit, Layout, Rectangle, rectangles

__all__ = [
    "DimSplit",
    "Layout",
    "Rectangle",
    "rectangles",
]

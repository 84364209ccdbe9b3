"""Where a tensor lives on a mesh, as arithmetic on tuples."""

from meshwise.layout.geometry import Rectangle, even_split, rectangles
from meshwise.layout.layout import Cut, Layout

__all__ = ["Cut", "Layout", "Rectangle", "even_split", "rectangles"]

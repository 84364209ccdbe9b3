"""Where one tensor lives on a mesh.

Every scheme of the field says three things of a tensor: which axes split which of its dims, over which axes it is
still a sum to be finished, and that the remaining axes hold copies. A `Layout` is exactly that, so a scheme can be a
page of layouts instead of a module that slices and communicates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.layout.geometry import Rectangle, even_split
from meshwise.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """Which axes split which dim of a tensor, and over which axes it is a partial sum; it is copied over the others.

    splits    per dim, the axes that split it, outermost first; () leaves the dim whole
    partial   the axes over which the true tensor is the sum of the ranks' tensors

    Prints short and parses back:

        dp,-         a matrix: dp splits its rows
        row.dep,col  row, and within it dep, splits dim 0; col splits dim 1
        -,- +tp      whole matrices, to be summed over tp
        ()           a scalar

    Raises ValueError when an axis appears twice.
    """

    splits: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        axes = [axis for split in self.splits for axis in split] + list(self.partial)
        if repeated := sorted({axis for axis in axes if axes.count(axis) > 1}):
            raise ValueError(f"axis {' '.join(repeated)} appears twice in the layout '{self}'; an axis plays one part")

    @classmethod
    def replicated(cls, ndim: int) -> Layout:
        """The layout of a tensor of `ndim` dims that every rank holds whole."""
        return cls(((),) * ndim)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that prints as `text`, such as `dp,- +tp`. Raises ValueError for anything else."""
        dim = r"(?:-|\w+(?:\.\w+)*)"
        match = re.fullmatch(rf"\s*(\(\)|{dim}(?:,{dim})*)((?:\s*\+\w+)*)\s*", text)
        if match is None:
            raise ValueError(f"{text!r} is not a layout; write the axes of each dim, as in 'dp,-', and '+tp' for a sum")
        dims = [] if match[1] == "()" else match[1].split(",")
        splits = tuple(() if axes == "-" else tuple(axes.split(".")) for axes in dims)
        return cls(splits, tuple(re.findall(r"\w+", match[2])))

    def __str__(self) -> str:
        dims = ",".join(".".join(axes) or "-" for axes in self.splits) or "()"
        return " ".join([dims, *(f"+{axis}" for axis in self.partial)])

    def local(self, shape: Sequence[int], *, mesh: Mesh, rank: int) -> Rectangle:
        """The part of a tensor of full shape `shape` that `rank` holds.

        A dim is split evenly, the first parts larger by one when it does not divide; a part is empty when the axes
        have more ranks than the dim has elements. Raises ValueError when the number of dims differs or the mesh lacks
        an axis of the layout.
        """
        if len(shape) != len(self.splits):
            raise ValueError(f"the layout '{self}' has {len(self.splits)} dims, the shape {tuple(shape)} {len(shape)}")
        for axis in self.partial:
            mesh.degree(axis)
        coordinate = mesh.coordinate(rank)
        bounds = []
        for size, axes in zip(shape, self.splits, strict=True):
            degrees = [mesh.degree(axis) for axis in axes]
            index = 0
            for axis, degree in zip(axes, degrees, strict=True):
                index = index * degree + coordinate[axis]
            bounds.append(even_split(size, math.prod(degrees))[index])
        return Rectangle(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))

"""Layout of one tensor on a mesh.

Every scheme of the field says three things of a tensor: which axes split which of its dims, over which axes it is still
a partial sum, and that the remaining axes hold copies. A `Layout` is exactly that, so a scheme can be a page of layouts
instead of a module that slices and communicates.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwise.base.mesh import Mesh, even_split
from meshwise.layout.rectangles import Rectangle


@dataclass(frozen=True)
class DimSplit:
    """Constraint on how a dim may be split.

    sections   sizes of parts that are each split by themselves, such as the q, k and v of a fused projection; () is one
    grain      elements that stay together, such as the features of an attention head

    Prints as `[64|64|64:16]`, and as nothing when the dim may be cut anywhere.
    """

    sections: tuple[int, ...] = ()
    grain: int = 1

    def __str__(self) -> str:
        grain = f":{self.grain}" if self.grain > 1 else ""
        return f"[{'|'.join(map(str, self.sections))}{grain}]" if self.sections or grain else ""

    @classmethod
    def parse(cls, text: str) -> "DimSplit":
        """Return the cut that prints as `text`."""
        sections, _, grain = text.strip("[]").partition(":")
        return cls(tuple(int(size) for size in sections.split("|") if size), int(grain or 1))

    def spans(self, size: int, *, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the (start, stop) of every section that is left after a cut for each (index, degree) in turn.

        Raises ValueError when the sections do not add up to `size` or are no multiples of the grain.
        """
        sections = self.sections or (size,)
        if sum(sections) != size or any(section % self.grain for section in sections):
            raise ValueError(f"a dim of {size} cannot be cut as '{self}': sections add up to it, in whole grains")
        spans = list(itertools.pairwise([0, *itertools.accumulate(sections)]))
        for index, degree in places:
            cuts = [even_split((stop - start) // self.grain, degree)[index] for start, stop in spans]
            spans = [
                (start + low * self.grain, start + high * self.grain)
                for (start, _), (low, high) in zip(spans, cuts, strict=True)
            ]
        return spans


ANYWHERE = DimSplit()


@dataclass(frozen=True)
class Layout:
    """Which axes split which dim of a tensor, and over which axes it is a partial sum; it is copied over the others.

    | splits    per dim, the axes that split it, outermost first; () leaves the dim whole
    | partial   the axes over which the true tensor is the sum of the ranks' tensors
    | cuts      per dim, how it may be cut; () lets every dim be cut anywhere

    Prints short and parses back:

        dp,-         a matrix: dp splits its rows
        row.dep,col  row, and within it dep, splits dim 0; col splits dim 1
        -,- +tp      whole matrices, to be summed over tp
        tp[8|8:4],-  tp splits the first 8 rows, and the next 8, four rows at a time
        ()           a scalar

    Raises ValueError when an axis appears twice, and when more than one dim has sections.
    """

    splits: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    cuts: tuple[DimSplit, ...] = ()

    def __post_init__(self) -> None:
        if self.cuts and len(self.cuts) != len(self.splits):
            raise ValueError(f"{len(self.cuts)} cuts for {len(self.splits)} dims")
        if all(cut == ANYWHERE for cut in self.cuts):
            object.__setattr__(self, "cuts", ())
        if sum(bool(cut.sections) for cut in self.cuts) > 1:
            raise ValueError(f"two dims have sections in the layout '{self}'; one at most can be put together again")
        axes = [axis for split in self.splits for axis in split] + list(self.partial)
        if repeated := sorted({axis for axis in axes if axes.count(axis) > 1}):
            raise ValueError(f"axis {' '.join(repeated)} appears twice in the layout '{self}'; an axis plays one part")

    @classmethod
    def replicated(cls, ndim: int) -> "Layout":
        """Return the layout of a tensor of `ndim` dims that every rank holds whole."""
        return cls(((),) * ndim)

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Return the layout that prints as `text`, such as `dp,- +tp`. Raises ValueError for anything else."""
        dim = r"(?:-|\w+(?:\.\w+)*)(?:\[\d*(?:\|\d+)*(?::\d+)?\])?"
        match = re.fullmatch(rf"\s*(\(\)|{dim}(?:,{dim})*)((?:\s*\+\w+)*)\s*", text)
        if match is None:
            raise ValueError(f"{text!r} is not a layout; write the axes of each dim, as in 'dp,-', and '+tp' for a sum")
        dims = [] if match[1] == "()" else match[1].split(",")
        words = [dim.partition("[") for dim in dims]
        splits = tuple(() if axes == "-" else tuple(axes.split(".")) for axes, _, _ in words)
        return cls(splits, tuple(re.findall(r"\w+", match[2])), tuple(DimSplit.parse(cut) for _, _, cut in words))

    def __str__(self) -> str:
        words = [f"{'.'.join(axes) or '-'}{cut}" for axes, cut in zip(self.splits, self._cuts, strict=True)]
        return " ".join([",".join(words) or "()", *(f"+{axis}" for axis in self.partial)])

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split it, dim by dim."""
        return tuple(axis for axes in self.splits for axis in axes)

    def local(self, shape: Sequence[int], *, mesh: Mesh, rank: int) -> Rectangle:
        """Return the part of a tensor of full shape `shape` that `rank` holds, where that is one rectangle.

        Raises ValueError as `pieces` does, and for a layout with sections.
        """
        [part] = self.pieces(shape, mesh=mesh, rank=rank)
        return part

    def pieces(self, shape: Sequence[int], *, mesh: Mesh, rank: int) -> tuple[Rectangle, ...]:
        """Return the parts of a tensor of full shape `shape` that `rank` holds, side by side along the dim with
        sections.

        A dim is split evenly in grains; the first parts are larger by one when it does not divide. Several axes split
        it one after the other: the second axis cuts each part of the first. A part is empty when there are more ranks
        than grains. Raises ValueError when the number of dims differs, the mesh lacks an axis of the layout, or a dim
        does not fit its cut.
        """
        bounds = self._bounds(shape, mesh=mesh, coordinate=mesh.coordinate(rank))
        return tuple(
            Rectangle(tuple(start for start, _ in corner), tuple(stop - start for start, stop in corner))
            for corner in itertools.product(*bounds)
        )

    def local_shape(self, shape: Sequence[int], *, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return the shape of what `rank` holds of a tensor of full shape `shape`. Raises ValueError as `pieces`
        does.
        """
        bounds = self._bounds(shape, mesh=mesh, coordinate=mesh.coordinate(rank))
        return tuple(sum(stop - start for start, stop in spans) for spans in bounds)

    @property
    def side(self) -> int:
        """The dim along which the pieces lie side by side."""
        return next((dim for dim, cut in enumerate(self.cuts) if cut.sections), 0)

    @property
    def _cuts(self) -> tuple[DimSplit, ...]:
        return self.cuts or (ANYWHERE,) * len(self.splits)

    def _bounds(
        self, shape: Sequence[int], *, mesh: Mesh, coordinate: Mapping[str, int]
    ) -> list[list[tuple[int, int]]]:
        """Per dim, the (start, stop) of every section."""
        if len(shape) != len(self.splits):
            raise ValueError(f"the layout '{self}' has {len(self.splits)} dims, the shape {tuple(shape)} {len(shape)}")
        for axis in self.partial:
            mesh.degree(axis)
        bounds = []
        for size, axes, cut in zip(shape, self.splits, self._cuts, strict=True):
            degrees = [mesh.degree(axis) for axis in axes]
            bounds.append(cut.spans(size, places=[(coordinate[a], d) for a, d in zip(axes, degrees, strict=True)]))
        return bounds

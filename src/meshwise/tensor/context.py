"""What all parts of one split model share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from meshwise.comm.world import World
from meshwise.layout.layout import Layout
from meshwise.tensor.matmul import Moved, Streaming
from meshwise.tensor.scheme import DIMS, Axes, Move, Scheme


@dataclass
class Extents:
    """How the activations of the forward under way are cut, where a rank's own part does not say how large the others
    are; None is alike.

    rows     of the batch, of each rank along the axis that gathers them
    tokens   of the sequence, of each rank along the axes that split them
    """

    rows: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Context:
    """The world, the scheme, the extents of the forward under way, and how operands stream."""

    world: World
    scheme: Scheme
    extents: Extents = dataclasses.field(default_factory=Extents)
    streaming: Streaming = dataclasses.field(default_factory=Streaming)

    def degree(self, axes: tuple[str, ...]) -> int:
        """How many ranks lie along `axes`."""
        return self.world.group(axes).size if axes else 1

    def sizes(self, layout: Layout, *, size: int, axes: Axes) -> tuple[int, ...]:
        """How much of a dim of `size`, laid out by `layout`, each rank along `axes` has."""
        mesh, ranks = self.world.mesh, self.world.group(axes).ranks if axes else (self.world.rank,)
        return tuple(layout.local_shape((size,), mesh=mesh, rank=rank)[0] for rank in ranks)

    def own(self, layout: Layout, *, size: int) -> int:
        """How much of a dim of `size`, laid out by `layout`, this rank has."""
        return layout.local_shape((size,), mesh=self.world.mesh, rank=self.world.rank)[0]

    def moved(self, move: Move, *, features: tuple[int, ...] | None = None) -> Moved:
        """A scheme's move of an activation, with the sizes it has now; `features`: those of the parts of that dim."""
        if self.degree(move.axes) == 1:
            return Moved()
        if move.dim == "alike":
            return Moved(move.axes)
        sizes = {"rows": self.extents.rows, "tokens": self.extents.tokens, "features": features}[move.dim]
        return Moved(move.axes, DIMS[move.dim], sizes)

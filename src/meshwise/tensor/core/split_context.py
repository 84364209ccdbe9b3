"""The state that all modules of one split model share: world, scheme, sizes and gathers of the forward under way."""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.layout.layout import Layout
from meshwise.model.forward_replay import ForwardReplay
from meshwise.tensor.core.matmul import InputGather, MatmulInput, OperandMove, Streaming, travelling
from meshwise.tensor.core.scheme import DIMS, Axes, OperandLayoutMove, Scheme, SchemeProduct
from meshwise.tensor.core.tensor_origins import TensorOrigins


class BoundToRank:
    """State of a split module on this rank: the world, sizes and moves. Deep copies of the module share it."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self


@dataclass
class ShardSizes:
    """Sizes of all ranks' parts in the forward under way, where a rank's own part does not show them; None means equal
    parts.

    | rows     of the batch, of each rank along the axis that gathers them
    | tokens   of the sequence, of each rank along the axes that split them
    """

    rows: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None

    def here(self) -> "ShardSizes":
        """Return the sizes of the forward under way, for `at`."""
        return dataclasses.replace(self)

    @contextlib.contextmanager
    def at(self, place: "ShardSizes") -> Iterator[None]:
        """Restore the sizes of `place` inside the block, while a part of that forward is repeated."""
        left = self.here()
        self.rows, self.tokens = place.rows, place.tokens
        try:
            yield
        finally:
            self.rows, self.tokens = left.rows, left.tokens


@dataclass
class SharedGather:
    """Last gathered input, for the matrices that have yet to read it.

    Which tensor a matrix reads shows when it is called. The first reader gathers it, or the module around the readers
    does so at its entry. Later readers of the same tensor, or of its gathered form, find it here.
    """

    part: Tensor | None = None
    version: int = 0
    operand: MatmulInput | None = None
    readers: int = 0

    def put(self, part: Tensor, *, operand: MatmulInput, readers: int) -> None:
        """Keep the gathered `operand` of `part` for `readers` matrices."""
        if readers and not part.is_inference():  # whose changes nobody counts
            self.part, self.version, self.operand, self.readers = part, part._version, operand, readers

    def take(self, x: Tensor) -> MatmulInput | None:
        """Return the gathered operand of `x` for one of the matrices, or None when `x` is something else."""
        operand = self.operand
        if operand is None or not (x is operand.value or (x is self.part and x._version == self.version)):
            return None
        self.readers -= 1
        if not self.readers:
            self.part = self.operand = None
        return operand


@dataclass(frozen=True)
class SplitContext:
    """The world and the scheme of a split model, and the sizes and shared gathers of the forward under way.

    `streaming`: how operands are gathered. `origins`: whose gradients are summed at the end of the step.
    """

    world: World
    scheme: Scheme
    extents: ShardSizes = dataclasses.field(default_factory=ShardSizes)
    shared_gather: SharedGather = dataclasses.field(default_factory=SharedGather)
    streaming: Streaming = dataclasses.field(default_factory=Streaming)
    recall: ForwardReplay = dataclasses.field(default_factory=ForwardReplay)
    origins: TensorOrigins = dataclasses.field(default_factory=TensorOrigins)

    def degree(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks along `axes`."""
        return self.world.group(axes).size if axes else 1

    def sizes(self, layout: Layout, *, size: int, axes: Axes) -> tuple[int, ...]:
        """Return each rank's size along `axes` of a dim of `size` laid out by `layout`."""
        mesh, ranks = self.world.mesh, self.world.group(axes).ranks if axes else (self.world.rank,)
        return tuple(layout.local_shape((size,), mesh=mesh, rank=rank)[0] for rank in ranks)

    def own(self, layout: Layout, *, size: int) -> int:
        """Return this rank's size of a dim of `size` laid out by `layout`."""
        return layout.local_shape((size,), mesh=self.world.mesh, rank=self.world.rank)[0]

    def moved(self, move: OperandLayoutMove, *, features: tuple[int, ...] | None = None) -> OperandMove:
        """Return the collective of a scheme's move on an activation; `features`: each rank's, if it moves features."""
        if self.degree(move.axes) == 1:
            return OperandMove()
        if move.dim == "none":
            return OperandMove(move.axes)
        sizes = {"rows": self.extents.rows, "tokens": self.extents.tokens, "features": features}[move.dim]
        return OperandMove(move.axes, DIMS[move.dim], sizes)

    def unflatten(self, x: Tensor, *, product: SchemeProduct) -> Tensor:
        """Return `x` with a dim for rows and one for tokens, if the model flattened them and the product moves one."""
        if x.dim() != 2:
            return x
        if product.x.dim == "rows" and (rows := self.extents.rows) is not None:
            own = rows[self.world.group(product.x.axes).index]
            return x if x.size(0) == own else x.unflatten(0, (own, -1))
        if "tokens" in (product.x.dim, product.y.dim) and (tokens := self.extents.tokens) is not None:
            own = tokens[self.world.group(product.x.axes).index] if product.x.dim == "tokens" else sum(tokens)
            return x if x.size(0) == own else x.unflatten(0, (-1, own))
        return x

    def take_features(self, x: Tensor, *, sizes: tuple[int, ...]) -> Tensor:
        """Return this rank's features of hidden states `x` that have all of them; `sizes`: features per rank."""
        if len(sizes) == 1 or x.size(-1) != sum(sizes):
            return x
        return gradient.take(x, world=self.world, axes=self.scheme.stream, dim=-1, sizes=sizes).wait()

    def gather_features_of(self, x: Tensor, *, sizes: tuple[int, ...]) -> Tensor:
        """Return all features of the hidden states `x`, for equal use on every rank."""
        if len(sizes) == 1 or x.size(-1) == sum(sizes):
            return x
        return gradient.replicate(x, world=self.world, axes=self.scheme.stream, dim=-1, sizes=sizes).wait()

    def stream_sizes(self, features: int) -> tuple[int, ...]:
        """Return how many features of the hidden states each rank has along the axes that split them."""
        return self.sizes(Layout((self.scheme.stream,)), size=features, axes=self.scheme.stream)

    def gather_shared(self, x: Tensor, *, moved: OperandMove, readers: int) -> MatmulInput:
        """Return `x` gathered, and keep it for `readers` more matrices."""
        if not moved.axes:
            return MatmulInput(x)
        sent, gathering = travelling(x), None
        if moved.dim is None:
            whole = gradient.copy(sent, world=self.world, axes=moved.axes).wait()
        else:
            whole = gradient.all_gather(
                sent, world=self.world, axes=moved.axes, dim=moved.dim, sizes=moved.sizes
            ).wait()
            gathering = None if self.streaming.keep else InputGather(self.world, moved=moved)
        operand = MatmulInput(whole, None if gathering is None else sent.detach(), gathering)
        self.shared_gather.put(x, operand=operand, readers=readers)
        return operand

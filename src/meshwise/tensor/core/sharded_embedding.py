"""Split an embedding over the vocabulary, and under some schemes over the features too.

A rank looks up the tokens in its part of the vocabulary, and has zeros for all other tokens. The ranks sum the results.
The sum equals the product of one-hot rows and the table."""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.layout.layout import Layout
from meshwise.model.parameter_table import Placement
from meshwise.model.torch_private import in_backward
from meshwise.tensor.core.linear import Projection
from meshwise.tensor.core.matmul import OperandMove
from meshwise.tensor.core.part import Part
from meshwise.tensor.core.split_context import BoundToRank, SplitContext
from meshwise.tensor.core.table_weight import TableWeight
from meshwise.tensor.schemes import OperandLayoutMove


class SplitTable(BoundToRank):
    """Sharded lookup of one embedding on this rank; call it with token numbers and this rank's part of the table.

    `shape`: shape of the full table, (vocabulary, features). `running` is True while the model runs; in this time
    `ShardedEmbedding.weight` is a `TableWeight`."""

    def __init__(self, context: SplitContext, *, shape: tuple[int, int], padding_idx: int | None) -> None:
        lookup, world = context.scheme.embedding, context.world
        self.context = context
        self.shape = shape
        self.size = shape[0]
        self.running = False
        self.layout = Layout((lookup.vocabulary, lookup.features))
        own = self.layout.local(shape, mesh=world.mesh, rank=world.rank)
        self._first, self._count = own.offsets[0], own.sizes[0]
        stored_here = padding_idx is not None and self._first <= padding_idx < self._first + self._count
        self._padding = padding_idx - self._first if stored_here and padding_idx is not None else None
        self._w = OperandMove()
        if context.degree(lookup.w.axes) > 1:
            features = Layout((lookup.w.axes,))
            self._w = OperandMove(lookup.w.axes, 1, context.sizes(features, size=shape[1], axes=lookup.w.axes))
        self._y = context.sizes(Layout((lookup.y.axes,)), size=shape[1], axes=lookup.y.axes)

    @property
    def placement(self) -> Placement:
        """Placement of the table. Its gradient is still to be summed over the row axes that the lookup leaves out."""
        scheme = self.context.scheme
        return Placement(
            self.layout, (*scheme.replicas, *(axis for axis in scheme.rows if axis not in scheme.embedding.w.axes))
        )

    def follow(self, model: nn.Module) -> None:
        """Register hooks that set `running` while a model runs."""
        model.register_forward_pre_hook(lambda *_: setattr(self, "running", True), prepend=True)
        model.register_forward_hook(lambda *_: setattr(self, "running", False), always_call=True)

    def as_matrix(self, table: Tensor) -> Tensor:
        """Return this rank's part of the table as a `TableWeight`, with which a forward may multiply."""
        return TableWeight(table, size=self.shape, head=lambda x, part: self._head.logits(x, weight=part))

    @functools.cached_property
    def _head(self) -> Projection:
        return Projection(self.context, part=Part("head"), shape=self.shape)

    def __call__(self, numbers: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings, (…, local features), of (…) token numbers. Raises IndexError for unknown numbers."""
        world, w = self.context.world, self._w
        if w.axes:
            arriving = gradient.all_gather(table, world=world, axes=w.axes, dim=1, sizes=w.sizes)
        own = self._own(numbers)
        whole = arriving.wait() if w.axes else table
        parts = functional.embedding(own.clamp_min(0), whole, padding_idx=self._padding)
        return self._added(parts.masked_fill((own < 0)[..., None], 0), self.context.scheme.embedding.y)

    def _own(self, numbers: Tensor) -> Tensor:
        """Return the row of each number in this rank's part of the table, or -1 for rows of other ranks."""
        inside = (numbers >= 0) & (numbers < self.size)
        if numbers.device.type == "cuda":
            torch._assert_async(inside.all())
        elif not numbers.is_meta and not bool(inside.all()):
            wrong = numbers[~inside][0]
            raise IndexError(f"number {int(wrong)} is not in a vocabulary of {self.size}")
        own = numbers - self._first
        return own.masked_fill((own < 0) | (own >= self._count), -1)

    def _added(self, parts: Tensor, move: OperandLayoutMove) -> Tensor:
        world = self.context.world
        if self.context.degree(move.axes) == 1:
            return parts
        if move.dim == "none":
            return gradient.all_reduce(parts, world=world, axes=move.axes).wait()
        moved = self.context.moved(move, features=self._y)
        assert moved.dim is not None
        return gradient.reduce_scatter(parts, world=world, axes=moved.axes, dim=moved.dim, sizes=moved.sizes).wait()


class ShardedEmbedding(nn.Embedding):
    """Embedding that holds this rank's part of the table; becomes a base class of the module's class."""

    sharding: SplitTable

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The parameter, or a `TableWeight` in the model's forward and in a forward that the backward repeats."""
        parameter: Tensor = self._parameters["weight"]  # type: ignore[assignment]
        return self.sharding.as_matrix(parameter) if self.sharding.running or in_backward() else parameter

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that torch gives it)
        """Return the embeddings of token numbers `input`, with this rank's features."""
        return self.sharding(input, self._parameters["weight"])  # type: ignore[arg-type]

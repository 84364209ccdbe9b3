"""Split linear layers: the placement of weight and bias, and the product on this rank."""

import dataclasses
from collections.abc import Sequence

from torch import Tensor, nn

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.layout.layout import ANYWHERE, Layout
from meshwise.model.parameter_table import Placement
from meshwise.tensor.core.matmul import MatmulCollectives, MatmulInput, OperandMove, matmul
from meshwise.tensor.core.part import Part
from meshwise.tensor.core.split_context import BoundToRank, SplitContext
from meshwise.tensor.core.split_logits import SplitLogits
from meshwise.tensor.core.vocab_parallel_loss import VocabularySplit
from meshwise.tensor.schemes import NO_MOVE, Scheme, SchemeProduct


class Projection(BoundToRank):
    """Sharded product of one linear on this rank; call it with this rank's input, weight and bias.

    `shape`: shape of the full weight as stored: (out, in), or (in, out) if `part.transposed`. A weight of several
    experts has a leading dim: (experts, out, in)."""

    def __init__(self, context: SplitContext, *, part: Part, shape: Sequence[int]) -> None:
        product = _product(context.scheme, part)
        within = -2 if part.transposed else -1
        out_cut = part.cut if part.role == "colwise" else ANYWHERE
        in_cut = part.cut if part.role == "rowwise" else ANYWHERE
        self.context = context
        self.product = product
        self.part = part
        self._shares = part.readers > 1 and not part.gathered
        stored = ((product.within, in_cut), (product.out, out_cut))
        experts = ((context.scheme.experts, ANYWHERE),) if len(shape) == 3 else ()
        axes, cuts = zip(*experts, *(stored if part.transposed else reversed(stored)), strict=True)
        self.layout = Layout(axes, cuts=cuts)
        out = Layout((product.features,), cuts=(out_cut,))
        self.bias_layout = Layout((context.scheme.experts, *out.splits), cuts=(ANYWHERE, out_cut)) if experts else out
        self.out_sizes = context.sizes(out, size=shape[-3 - within], axes=product.features)
        self._x = context.sizes(Layout((product.x.axes,), cuts=(in_cut,)), size=shape[within], axes=product.x.axes)
        self._stream = context.stream_sizes(shape[within])
        self._within = within
        self._w = self._weight_move(tuple(shape))

    @property
    def weight_placement(self) -> Placement:
        """Placement of the weight. Its gradient is still to be summed over the row axes that the matmul leaves out."""
        done = (*self.product.w.axes, *self.product.y.axes)
        return Placement(
            self.layout, (*self.context.scheme.replicas, *(axis for axis in self.product.rows if axis not in done))
        )

    @property
    def bias_placement(self) -> Placement:
        """Placement of the bias."""
        return Placement(self.bias_layout, (*self.context.scheme.replicas, *self.product.rows))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product: (…, local in) to (…, local out). The scheme may change the rank's rows and tokens."""
        context, product = self.context, self.product
        if self.part.role != "rowwise" and not self.part.gathered:
            x = context.take_features(x, sizes=self._stream)
        unflattened = context.unflatten(x, product=product)
        if unflattened is not x:
            return self(unflattened, weight, bias).flatten(0, 1)
        operation = MatmulCollectives(
            world=context.world,
            x=OperandMove() if self._shares else context.moved(product.x, features=self._x),
            w=self._w,
            y=context.moved(product.y),
            within=self._within,
            streaming=context.streaming,
            recall=context.recall,
        )
        y = matmul(self._operand(x), weight=weight, bias=bias, operation=operation)
        if self.part.role == "single" and not context.scheme.stream:
            y = gradient.replicate(y, world=context.world, axes=product.features, dim=-1, sizes=self.out_sizes).wait()
        return y

    def logits(self, x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return a head's logits: `SplitLogits`, or whole logits if one rank has all or the part demands it."""
        local, axes = self(x, weight, bias), self.product.features
        if self.context.degree(axes) == 1:
            return local
        logits = SplitLogits(local, vocabulary=VocabularySplit(self.context.world, axes, self.out_sizes))
        return logits.whole() if self.part.whole_features else logits

    def _operand(self, x: Tensor) -> MatmulInput:
        """Return the operand to multiply for input `x`. Linears with the same input share one gather."""
        context = self.context
        arrived = context.shared_gather.take(x) if self._shares or self.part.gathered else None
        if arrived is not None or not self._shares:
            return arrived or MatmulInput(x)
        moved = context.moved(self.product.x, features=self._x)
        return context.gather_shared(x, moved=moved, readers=self.part.readers - 1)

    def _weight_move(self, shape: tuple[int, ...]) -> OperandMove:
        """Return the gather of the weight."""
        move, world = self.product.w, self.context.world
        if self.context.degree(move.axes) == 1:
            return OperandMove()
        dim = self._within if move.dim == "in" else -3 - self._within
        ranks = world.group(move.axes).ranks
        sizes = tuple(self.layout.local_shape(shape, mesh=world.mesh, rank=rank)[dim] for rank in ranks)
        return OperandMove(move.axes, dim, sizes)


class ShardedLinear(nn.Module):
    """Linear with this rank's part of weight and bias; it becomes the first base class of the module's class."""

    sharding: Projection
    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that torch gives it)
        """Return this rank's part of the linear's output."""
        return self.sharding(input, self.weight, self.bias)


class ShardedHead(ShardedLinear):
    """Linear that returns logits, which stay split over the vocabulary."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that torch gives it)
        """Return the logits as `SplitLogits`, or as a plain tensor if one rank has them all."""
        return self.sharding.logits(input, weight=self.weight, bias=self.bias)


def _product(scheme: Scheme, part: Part) -> SchemeProduct:
    if part.role in ("single", "head"):
        return scheme.head
    product: SchemeProduct = {"colwise": scheme.colwise, "rowwise": scheme.rowwise}[part.role]
    if part.shared:
        out = tuple(axis for axis in product.out if axis not in scheme.kv_replicas)
        product = dataclasses.replace(product, out=out, rows=(*product.rows, *scheme.kv_replicas))
    return dataclasses.replace(product, x=NO_MOVE) if part.gathered else product

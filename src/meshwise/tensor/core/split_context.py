"""State that all modules of a split model share: world, scheme, and the sizes and gathers of the current forward.

`TensorOrigins` finds the axes over which a tensor's gradient is summed already, from the graph that computed the
tensor. Each rank uses an argument of an attention for its own heads, and the gradients of all heads must be summed
exactly once. The origin of the argument decides if the attention has to sum them:

    | bias = outer                 equal on all ranks, from outside of the blocks: here `gradient.copy` must sum
    | bias = self.table(places)    from a parameter that all ranks have whole: the end of the step sums its gradient
    | bias = copied * 2            from the output of a `gradient.copy` in a module around this one, which sums
    | value = first_block_value    from a matmul: each rank has only its own heads, so nothing is summed"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from meshwise.base.mesh import even_split
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.layout.layout import ANYWHERE, DimSplit, Layout
from meshwise.model.forward import ForwardReplay
from meshwise.model.parameter_table import Placement
from meshwise.model.torch_private import graph_nodes
from meshwise.tensor.core.matmul import InputGather, MatmulCollectives, MatmulInput, OperandMove, to_product_dtype
from meshwise.tensor.tp_schemes import DIMS, Axes, OperandLayoutMove, Scheme, SchemeProduct


class TensorOrigins:
    """Finder of the axes over which a tensor's gradient is summed already, from the graph that computed the tensor."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._placed: Mapping[str, Placement] = {}
        self._summed: dict[Tensor, Axes] = {}

    def follow(self, model: nn.Module, *, placed: Mapping[str, Placement]) -> None:
        """Set the model and the placements `placed`, by every name of a parameter, and register a hook."""
        self._model, self._placed = model, placed
        # an engine may have replaced the parameters since the last forward
        model.register_forward_pre_hook(lambda *_: self._summed.clear(), prepend=True)

    def summed_behind(self, x: Tensor, *, axes: Axes) -> Axes:
        """Return the axes over which the gradient of `x` is summed later in the backward: by the nearest parameter,
        matmul or collective that `x` was computed from. () if none of them sums it."""
        if x.is_leaf:
            return self._at_leaf(x)
        for node in graph_nodes([x.grad_fn]):
            leaf = getattr(node, "variable", None)
            summed = _summed_by(node, axes=axes) if leaf is None else self._at_leaf(leaf)
            if summed is not None:
                return summed
        return ()

    def _at_leaf(self, x: Tensor) -> Axes:
        """Return the axes over which the step sums the gradient of leaf `x`; () if `x` is no parameter."""
        if not self._summed and self._model is not None:
            named = self._model.named_parameters(remove_duplicate=False)
            self._summed = {value: self._placed[name].summed for name, value in named if name in self._placed}
        return self._summed.get(x, ())


def _summed_by(node: Node, *, axes: Axes) -> Axes | None:
    """Return the axes over which a matmul or a collective sums gradients; None for any other node."""
    operation = getattr(node, "operation", None)
    if isinstance(operation, MatmulCollectives):
        replicated = operation.y.axes if operation.y.dim is None else ()
        return tuple(axis for axis in axes if axis not in replicated)
    source = gradient.source_of_output(node)
    if source is None or not set(source[1]).intersection(axes):
        return None
    return source[1] if source[0] == "whole" else ()


class BoundToRank:
    """Base class for the attribute `sharding` of a split module; deep copies of the module share the object."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self


@dataclass
class ShardSizes:
    """Sizes of all ranks' parts in the current forward. As a `RememberedState` it is restored in a repeated forward.

    | rows     rows of the batch on each rank along the axis that gathers rows (3D); None if they are equal
    | tokens   tokens of each rank along the axes that split tokens; None if tokens are not split or not known yet"""

    rows: tuple[int, ...] | None = None
    tokens: tuple[int, ...] | None = None

    def snapshot(self) -> "ShardSizes":
        """Return a copy of the current sizes, for `restored`."""
        return dataclasses.replace(self)

    @contextlib.contextmanager
    def restored(self, place: "ShardSizes") -> Iterator[None]:
        """Inside the block, which repeats a part of an earlier forward, set the sizes of `place`."""
        left = self.snapshot()
        self.rows, self.tokens = place.rows, place.tokens
        try:
            yield
        finally:
            self.rows, self.tokens = left.rows, left.tokens


@dataclass
class SharedGather:
    """Last gathered input, kept until all matrices that read this input have taken it.

    The input is gathered by the first matrix that reads it, or at the entry of the module around the matrices. Later
    matrices call `take`: it returns the gathered input to those that read `part` (at `version`) or the gathered tensor.
    `readers`: number of matrices that will still take it."""

    part: Tensor | None = None
    version: int = 0
    operand: MatmulInput | None = None
    readers: int = 0

    def put(self, part: Tensor, *, operand: MatmulInput, readers: int) -> None:
        """Keep the gathered `operand` of `part` for `readers` matrices; tensors of inference mode are not kept."""
        if readers and (torch.compiler.is_dynamo_compiling() or not part.is_inference()):  # inference: no version
            self.part, self.version, self.operand, self.readers = part, part._version, operand, readers

    def take(self, x: Tensor) -> MatmulInput | None:
        """Return the kept operand if `x` is its part or the gathered tensor; else None. The last reader releases it."""
        operand = self.operand
        compiles = torch.compiler.is_dynamo_compiling()  # its tensors have no versions
        if operand is None or not (x is operand.value or (x is self.part and (compiles or x._version == self.version))):
            return None
        self.readers -= 1
        if not self.readers:
            self.part = self.operand = None
        return operand


@dataclass(frozen=True)
class SplitContext:
    """World and scheme of a split model, inside or outside of its blocks, and state of the current forward.

    `shard_sizes`: sizes of the ranks' parts. `keeps`: as in `MatmulCollectives`. `recall`: results kept for a repeated
    forward. `origins`: finds gradients that the step sums."""

    world: World
    scheme: Scheme
    shard_sizes: ShardSizes = dataclasses.field(default_factory=ShardSizes)
    shared_gather: SharedGather = dataclasses.field(default_factory=SharedGather)
    keeps: bool = False
    recall: ForwardReplay = dataclasses.field(default_factory=ForwardReplay)
    origins: TensorOrigins = dataclasses.field(default_factory=TensorOrigins)

    def degree(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks along `axes`."""
        return self.world.group(axes).size if axes else 1

    def sizes(self, size: int, *, axes: Axes, cut: DimSplit = ANYWHERE) -> tuple[int, ...]:
        """Return how many entries of a dim of `size` each rank has if `axes` split it under `cut`, in group order."""
        layout, ranks = Layout((axes,), cuts=(cut,)), self.world.group(axes).ranks if axes else (self.world.rank,)
        return tuple(layout.local_shape((size,), mesh=self.world.mesh, rank=rank)[0] for rank in ranks)

    def own_size(self, size: int, *, axes: Axes, cut: DimSplit = ANYWHERE) -> int:
        """Return how many entries of a dim of `size` this rank has if `axes` split it under the constraint `cut`."""
        return self.sizes(size, axes=axes, cut=cut)[self.world.group(axes).index if axes else 0]

    def operand_move(self, move: OperandLayoutMove, *, features: tuple[int, ...] | None = None) -> OperandMove:
        """Return a scheme's move of an activation with the ranks' sizes; `features`: sizes for a move of features."""
        if self.degree(move.axes) == 1:
            return OperandMove()
        if move.dim == "none":
            return OperandMove(move.axes)
        sizes = {"rows": self.shard_sizes.rows, "tokens": self.shard_sizes.tokens, "features": features}[move.dim]
        return OperandMove(move.axes, DIMS[move.dim], sizes)

    def unflatten(self, x: Tensor, *, product: SchemeProduct) -> Tensor:
        """Return `x` of (rows · tokens, features) as (rows, tokens, features) if `product` moves rows or tokens."""
        if x.dim() != 2:
            return x
        if product.x.dim == "rows" and (rows := self.shard_sizes.rows) is not None:
            own = rows[self.world.group(product.x.axes).index]
            return x if x.size(0) == own else x.unflatten(0, (own, -1))
        if "tokens" in (product.x.dim, product.y.dim) and (tokens := self.shard_sizes.tokens) is not None:
            own = tokens[self.world.group(product.x.axes).index] if product.x.dim == "tokens" else sum(tokens)
            return x if x.size(0) == own else x.unflatten(0, (-1, own))
        return x

    def take_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of hidden states `x`, and set the ranks' numbers of tokens in `shard_sizes`."""
        axes = self.scheme.tokens
        bounds = even_split(x.size(-2), self.world.group(axes).size)
        self.shard_sizes.tokens = tuple(stop - start for start, stop in bounds)
        return gradient.take(x, world=self.world, axes=axes, dim=-2, sizes=self.shard_sizes.tokens).wait()

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Return hidden states `x` with all tokens. All ranks must compute the same from them."""
        axes, sizes = self.scheme.tokens, self.shard_sizes.tokens
        return gradient.replicate(x, world=self.world, axes=axes, dim=-2, sizes=sizes).wait()

    def take_features(self, x: Tensor, *, sizes: tuple[int, ...]) -> Tensor:
        """Return this rank's features of `x` if `x` has all features, else `x`. `sizes`: each rank's number."""
        if len(sizes) == 1 or x.size(-1) != sum(sizes):
            return x
        return gradient.take(x, world=self.world, axes=self.scheme.hidden, dim=-1, sizes=sizes).wait()

    def gather_features_of(self, x: Tensor, *, sizes: tuple[int, ...]) -> Tensor:
        """Return `x` with all features. All ranks must compute the same from it. `sizes`: each rank's features."""
        if len(sizes) == 1 or x.size(-1) == sum(sizes):
            return x
        return gradient.replicate(x, world=self.world, axes=self.scheme.hidden, dim=-1, sizes=sizes).wait()

    def hidden_sizes(self, features: int) -> tuple[int, ...]:
        """Return each rank's number of features of hidden states that have `features` in total."""
        return self.sizes(features, axes=self.scheme.hidden)

    def gather_shared(self, x: Tensor, *, moved: OperandMove, readers: int) -> MatmulInput:
        """Gather `x` as `moved` describes, keep it for `readers` further matrices, and return it as an operand.

        Raises ValueError if `x` has other tokens than the hidden states of this rank."""
        if not moved.axes:
            return MatmulInput(x)
        sent, gathering = to_product_dtype(x), None
        if moved.dim is None:
            whole = gradient.copy(sent, world=self.world, axes=moved.axes).wait()
        else:
            dim, sizes = moved.dim, moved.sizes
            own = x.size(dim) if sizes is None or dim != DIMS["tokens"] else self.world.group(moved.axes).own(sizes)
            if sizes is not None and x.size(dim) != own:
                raise ValueError(
                    f"an attention reads {x.size(dim)} tokens, and this rank has {own} of the hidden states' "
                    f"{sum(sizes)}: sequence_parallel=1 does not split another sequence, such as an encoder's output. "
                    "Use sequence_parallel=0"
                )
            whole = gradient.all_gather(sent, world=self.world, axes=moved.axes, dim=dim, sizes=sizes).wait()
            gathering = None if self.keeps else InputGather(self.world, moved=moved)
        operand = MatmulInput(whole, None if gathering is None else sent.detach(), gathering)
        self.shared_gather.put(x, operand=operand, readers=readers)
        return operand

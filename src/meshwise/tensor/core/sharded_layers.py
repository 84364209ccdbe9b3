"""Torch's layers on one rank's shards: linear, head, embedding, LayerNorm, RMSNorm, multi-head attention.

Each `Sharded…` class becomes the first base class of a module's class. Its attribute `sharding` knows the split. Under
compile=blocks a linear is one operator in the graph of its block; others run uncompiled, between compiled parts.

*Embedding*: a rank looks up the tokens in its part of the vocabulary, and has zeros for all other tokens. The ranks sum
the results. The sum equals the product of one-hot rows and the table.

*Norms*: each rank sends the mean and variance of its own features of a token, which are combined exactly (Chan, Golub
and LeVeque, 1979); docs/tensor.md has what travels ("Communication").

    x̂ = (x - mean) / σ    dx = (g - mean(g) - x̂ · mean(g · x̂)) / σ,  g = dy · weight   RMSNorm omits mean and mean(g)

*nn.MultiheadAttention* holds the matrices of q, k and v as parameters, not as linear layers. It passes them to one
functional (in eval mode, to a fused kernel) that cannot be split. So it gets a new forward over two projections, with
the arguments, masks and results of torch's forward:

    query, key, value ── in_proj (colwise) ── heads of this rank ── out_proj (rowwise)

L, S: numbers of query and key tokens; N: rows; E, H: this rank's features and heads; D: a head's width."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.layout.layout import ANYWHERE, Layout
from meshwise.model.parameter_table import Placement
from meshwise.model.torch_private import in_backward, needed_gradients
from meshwise.tensor.core.activation_reshard import sum_gradient_over_heads, to_hidden_rows, to_inner_rows
from meshwise.tensor.core.compiled_matmul import PRODUCTS, compiled_matmul
from meshwise.tensor.core.matmul import MatmulCollectives, MatmulInput, OperandMove, matmul
from meshwise.tensor.core.module_role import Norm, Part
from meshwise.tensor.core.split_context import BoundToRank, SplitContext
from meshwise.tensor.core.vocab_parallel import DimShards, SplitLogits, TableWeight, require_valid
from meshwise.tensor.tp_schemes import NO_MOVE, Axes, Scheme, SchemeProduct


class Projection(BoundToRank):
    """Sharded product of one linear on this rank; call it with this rank's input, weight and bias.

    `shape`: shape of the full weight as stored: (out, in), or (in, out) if `part.transposed`. A weight of several
    experts has a leading dim: (experts, out, in)."""

    def __init__(self, context: SplitContext, *, part: Part, shape: Sequence[int]) -> None:
        product = _product(context.scheme, part)
        input_dim = -2 if part.transposed else -1
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
        self.out_sizes = context.sizes(shape[-3 - input_dim], axes=product.features, cut=out_cut)
        self._x = context.sizes(shape[input_dim], axes=product.x.axes, cut=in_cut)
        self._hidden = context.hidden_sizes(shape[input_dim])
        self._input_dim = input_dim
        self.weight_move = self._weight_move(tuple(shape))
        self.ticket = PRODUCTS.add(self)
        self._operations: dict[tuple[tuple[int, ...], ...], MatmulCollectives] = {}

    @property
    def input_move(self) -> OperandMove:
        """Gather of the input."""
        return self.context.operand_move(self.product.x, features=self._x)

    @property
    def weight_placement(self) -> Placement:
        """Placement of the weight. The step sums its gradient over replicas and row axes, except axes of the matmul."""
        done = (*self.product.w.axes, *self.product.y.axes)
        rows = (axis for axis in self.product.rows if axis not in done)
        return Placement(self.layout, (*self.context.scheme.replicas, *rows))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Map local (…, in) to local (…, out). The scheme decides which rows and tokens a rank has before and after."""
        context, product = self.context, self.product
        if self.part.role != "rowwise" and not self.part.gathered:
            x = context.take_features(x, sizes=self._hidden)
        unflattened = context.unflatten(x, product=product)
        if unflattened is not x:
            return self(unflattened, weight, bias).flatten(0, 1)
        operation, operand = self.operation(), self._operand(x)
        multiplied = matmul
        if torch.compiler.is_dynamo_compiling():
            shape = self._shape(operand.value, weight, operation=operation)
            multiplied = partial(compiled_matmul, product=self.ticket, shape=shape)
        y = multiplied(operand, weight=weight, bias=bias, operation=operation)
        if self.part.role == "single" and not context.scheme.hidden:
            y = gradient.replicate(y, world=context.world, axes=product.features, dim=-1, sizes=self.out_sizes).wait()
        return y

    def logits(self, x: Tensor, *, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return a head's logits: `SplitLogits`; a plain tensor if one rank has all, or with `part.whole_features`."""
        local, axes = self(x, weight, bias), self.product.features
        if self.context.degree(axes) == 1:
            return local
        logits = SplitLogits(local, vocabulary=DimShards(self.context.world, axes, self.out_sizes))
        return logits.whole() if self.part.whole_features else logits

    def operation(self, sizes: Sequence[Sequence[int]] = ()) -> MatmulCollectives:
        """Return the collectives of the product. sizes: the ranks' sizes of X and Y; by default the present ones."""
        key = tuple(map(tuple, sizes))
        if key in self._operations:
            return self._operations[key]
        x = OperandMove() if self._shares else self.input_move
        y = self.context.operand_move(self.product.y)
        if key:
            x, y = (dataclasses.replace(one, sizes=size or None) for one, size in zip((x, y), key, strict=True))
        context, dim = self.context, self._input_dim
        found = MatmulCollectives(context.world, x, self.weight_move, y, dim, context.keeps, context.recall)
        if key:
            self._operations[key] = found
        return found

    def _shape(self, x: Tensor, weight: Tensor, *, operation: MatmulCollectives) -> list[int]:
        """Return the shape of the product's result on this rank."""
        moved, w, y, out = operation.x, operation.w, operation.y, -3 - self._input_dim
        shape = [*x.shape[:-1], sum(w.sizes) if w.sizes is not None and w.dim == out else weight.size(out)]
        if moved.dim is not None and moved.dim != -1:
            shape[moved.dim] = sum(moved.sizes or [shape[moved.dim]] * self.context.degree(moved.axes))
        if y.dim is not None:
            sizes = y.sizes or [shape[y.dim] // self.context.degree(y.axes)]
            shape[y.dim] = self.context.world.group(y.axes).own(sizes)
        return shape

    def _operand(self, x: Tensor) -> MatmulInput:
        """Return input `x` as an operand. Linears with the same input share one gather."""
        context = self.context
        arrived = context.shared_gather.take(x) if self._shares or self.part.gathered else None
        if arrived is None and self.part.gathered:  # it may read another tensor, such as an encoder's output
            x = sum_gradient_over_heads(x, context=context)
        if arrived is not None or not self._shares:
            return arrived or MatmulInput(x)
        return context.gather_shared(x, moved=self.input_move, readers=self.part.readers - 1)

    def _weight_move(self, shape: tuple[int, ...]) -> OperandMove:
        move, world = self.product.w, self.context.world
        if self.context.degree(move.axes) == 1:
            return OperandMove()
        dim = self._input_dim if move.dim == "in" else -3 - self._input_dim
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
        if torch.compiler.is_dynamo_compiling() and not self.sharding.context.keeps:
            return self.sharding(input, self.weight, self.bias)
        return self._uncompiled(input)

    @gradient.uncompiled
    def _uncompiled(self, input: Tensor) -> Tensor:  # noqa: A002 (as of `forward`)
        return self.sharding(input, self.weight, self.bias)


class ShardedHead(ShardedLinear):
    """Linear that returns logits, which stay split over the vocabulary."""

    @gradient.uncompiled
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that torch gives it)
        """Return the logits as `SplitLogits`, or as a plain tensor (see `Projection.logits`)."""
        return self.sharding.logits(input, weight=self.weight, bias=self.bias)


def _product(scheme: Scheme, part: Part) -> SchemeProduct:
    if part.role in ("single", "head"):
        return scheme.head
    product: SchemeProduct = {"colwise": scheme.colwise, "rowwise": scheme.rowwise}[part.role]
    if part.shared:
        out = tuple(axis for axis in product.out if axis not in scheme.kv_replicas)
        product = dataclasses.replace(product, out=out, rows=(*product.rows, *scheme.kv_replicas))
    return dataclasses.replace(product, x=NO_MOVE) if part.gathered else product


class SplitTable(BoundToRank):
    """Sharded lookup of one embedding on this rank; call it with token numbers and this rank's part of the table.

    `shape`: (vocabulary, features) of the full table. `padding_idx`: as in nn.Embedding. `head`: product of hidden
    states and the table. `running`: True while the model runs; then `ShardedEmbedding.weight` is a `TableWeight`.
    `name`: name of the embedding, for messages."""

    def __init__(self, context: SplitContext, *, name: str, shape: tuple[int, int], padding_idx: int | None) -> None:
        self.context, self.name = context, name
        self.head = Projection(context, part=Part("head"), shape=shape)
        self.shape = shape
        self.running = False
        own = self.head.layout.local(shape, mesh=context.world.mesh, rank=context.world.rank)
        self._first, self._count = own.offsets[0], own.sizes[0]
        stored_here = padding_idx is not None and self._first <= padding_idx < self._first + self._count
        self._padding = padding_idx - self._first if stored_here and padding_idx is not None else None

    def follow(self, model: nn.Module) -> None:
        """Register hooks that set `running` while a model runs."""
        model.register_forward_pre_hook(lambda *_: setattr(self, "running", True), prepend=True)
        model.register_forward_hook(lambda *_: setattr(self, "running", False), always_call=True)

    def __call__(self, numbers: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings, (…, local features), of (…) token numbers. Raises IndexError for unknown numbers."""
        world, w = self.context.world, self.head.weight_move
        if w.axes:
            arriving = gradient.all_gather(table, world=world, axes=w.axes, dim=1, sizes=w.sizes)
        own = self._own(numbers)
        whole = arriving.wait() if w.axes else table
        parts = functional.embedding(own.clamp_min(0), whole, padding_idx=self._padding)
        return self._summed(parts.masked_fill((own < 0)[..., None], 0))

    def _own(self, numbers: Tensor) -> Tensor:
        """Return the row of each number in this rank's part of the table, or -1 for rows of other ranks."""
        inside = (numbers >= 0) & (numbers < self.shape[0])
        require_valid(numbers, valid=inside, problem=f"number {{}} is not in a vocabulary of {self.shape[0]}")
        own = numbers - self._first
        return own.masked_fill((own < 0) | (own >= self._count), -1)

    def _summed(self, parts: Tensor) -> Tensor:
        world, moved = self.context.world, self.head.input_move
        if not moved.axes:
            return parts
        if moved.dim is None:
            return gradient.all_reduce(parts, world=world, axes=moved.axes).wait()
        return gradient.reduce_scatter(parts, world=world, axes=moved.axes, dim=moved.dim, sizes=moved.sizes).wait()


class ShardedEmbedding(nn.Embedding):
    """Embedding that holds this rank's part of the table; becomes a base class of the module's class."""

    sharding: SplitTable

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The parameter, or a `TableWeight` in the model's forward and in a forward that the backward repeats."""
        parameter: Tensor = self._parameters["weight"]  # type: ignore[assignment]
        if not (self.sharding.running or in_backward()):
            return parameter
        return TableWeight(parameter, table=self.sharding)

    @gradient.uncompiled
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that torch gives it)
        """Return the embeddings of token numbers `input`, with this rank's features."""
        return self.sharding(input, self._parameters["weight"])  # type: ignore[arg-type]


@dataclass(frozen=True)
class SplitNorm(BoundToRank, DimShards):
    """LayerNorm or RMSNorm on this rank: its formula, and the split of the features."""

    norm: Norm

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the normalised `x`, (…, local features), in its dtype; `weight` and `bias` are this rank's part."""
        wide = x.to(self.norm.statistics or (x.dtype if x.element_size() >= 4 else torch.float32))
        if wide.dtype == x.dtype or self.norm.centred:
            result: Tensor = _Normalise.apply(wide, weight, bias, self)
            return result.to(x.dtype)
        # An RMSNorm with float32 statistics rounds to the input's dtype first, and then multiplies by the gain.
        normalised: Tensor = _Normalise.apply(wide, None, None, self)
        return normalised.to(x.dtype) if weight is None else weight * normalised.to(x.dtype)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each token over all features, (…, 1); for RMSNorm 0 and the mean square."""
        own = torch.stack((x.mean(-1), x.var(-1, correction=0))) if self.norm.centred else x.square().sum(-1)[None]
        if not self.norm.centred:
            self.world.all_reduce(own, axes=self.axes).wait()
            return x.new_zeros(()), (own[0] / self.size)[..., None]
        parts = own.new_empty(len(self.sizes), *own.shape)
        self.world.all_gather(own, into=parts, axes=self.axes).wait()
        counts = torch.cat([own.new_full([1] * own.dim(), size) for size in self.sizes])  # avoids a copy to the GPU
        means, variances = parts.unbind(1)
        mean = (counts * means).sum(0) / self.size
        variance = (counts * (variances + (means - mean).square())).sum(0) / self.size
        return mean[..., None], variance[..., None]


class ShardedNorm(nn.Module):
    """Norm that holds this rank's part of weight and bias; becomes the first base class of the module's class."""

    sharding: SplitNorm

    @gradient.uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of this rank's features `x`, with statistics over all features."""
        norm = self.sharding.norm
        stored = self._parameters.get(norm.gain)
        gain = stored + norm.offset if stored is not None and norm.offset else stored
        return self.sharding(x, gain, self._parameters.get(norm.bias))


class ShardedMagnitude(nn.Module):
    """Part of PEFT's DoRA that scales the rows of W + B A to learned norms; it becomes the first base of its class.

    `sharding`: the world, and the axes that split the rows; () if a rank has whole rows."""

    sharding: tuple[World, Axes]
    fan_in_fan_out: bool

    def get_lora_weight(self, *, lora_A: nn.Module, lora_B: nn.Module, **_: Any) -> Tensor:
        """Return this rank's part of B A, (outputs, inputs), without a call of `forward`, which sums over the ranks."""
        return lora_B.get_parameter("weight").detach() @ lora_A.get_parameter("weight").detach()

    @gradient.uncompiled
    def get_weight_norm(self, *, weight: Tensor, lora_weight: Tensor, scaling: float, **_: Any) -> Tensor:
        """Return the norms (outputs,) of the whole rows of W + scaling · B A; PEFT takes no gradient of them."""
        world, axes = self.sharding
        whole = (weight.T if self.fan_in_fan_out else weight).detach() + scaling * lora_weight
        wide = torch.promote_types(whole.dtype, torch.float32)  # squares in half precision overflow or underflow
        squares = whole.to(wide).square().sum(1)
        world.all_reduce(squares, axes=axes).wait()
        return squares.sqrt().to(whole.dtype)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, split: SplitNorm) -> Tensor:
        mean, variance = split.moments(x)
        epsilon = torch.finfo(x.dtype).eps if split.norm.epsilon is None else split.norm.epsilon
        scale = (variance + epsilon).rsqrt()
        normalised = x * scale if not split.norm.centred else (x - mean) * scale
        ctx.split = split
        ctx.save_for_backward(normalised, scale, weight)
        y = normalised if weight is None else normalised * weight
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        normalised, scale, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = needed_gradients(ctx)[:3]
        g = dy if weight is None or not for_x else dy * weight
        dx = _start_dx(g, normalised=normalised, scale=scale, split=ctx.split) if for_x else None
        over = tuple(range(dy.dim() - 1))  # while the means arrive
        d_weight = (dy * normalised).sum(over).to(weight.dtype) if for_weight else None
        d_bias = dy.sum(over) if for_bias else None
        return dx and dx(), d_weight, d_bias, None


def _start_dx(g: Tensor, *, normalised: Tensor, scale: Tensor, split: SplitNorm) -> Callable[[], Tensor]:
    """Start the all-reduce of the means in the formula of dx, and return a function that waits and returns dx."""
    means = torch.stack([(g * normalised).sum(-1)] + ([g.sum(-1)] if split.norm.centred else []))
    reducing = split.world.all_reduce(means, axes=split.axes)

    def finish() -> Tensor:
        reducing.wait()
        over_all = means[..., None] / split.size
        dx = torch.addcmul(g, normalised, over_all[0], value=-1)
        if split.norm.centred:
            dx -= over_all[1]
        return dx * scale

    return finish


@dataclass(frozen=True)
class MultiheadSharding(BoundToRank):
    """State of an attention on this rank: the context of the split model, and the projections by parameter name."""

    context: SplitContext
    projections: Mapping[str, Projection]


_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


class ShardedMultiheadAttention(nn.MultiheadAttention):
    """torch's attention on this rank's `num_heads` heads; it becomes the first base of the module's class."""

    sharding: MultiheadSharding

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, so that torch's encoder layer does not pass all weights to a fused kernel."""
        return False

    @gradient.uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return torch's results for torch's arguments: the output, and the attention weights of all ranks' heads."""
        bound = _SIGNATURE.bind(self, *args, **kwargs)
        bound.apply_defaults()
        call = SimpleNamespace(**bound.arguments)
        batched = call.query.dim() == 3
        q, k, v = self._project(call.query, call.key, call.value)
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v, appended = self._appended(k, v)
        q_NHLD, k_NHSD, v_NHSD = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        mask = self._mask(call, like=q_NHLD, appended=appended)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if call.need_weights:
            mixed, weights = _attend(q_NHLD, k_NHSD, v_NHSD, mask=mask, dropout=dropout)
        else:
            causal = call.is_causal and call.key_padding_mask is None and not appended
            mixed = functional.scaled_dot_product_attention(
                q_NHLD, k_NHSD, v_NHSD, attn_mask=None if causal else mask, is_causal=causal, dropout_p=dropout
            )
        y = mixed.transpose(1, 2).flatten(2)
        if not batched:
            y = y.squeeze(0)
        elif not self.batch_first:
            y = y.transpose(0, 1)
        output = self.out_proj(y)
        if weights is not None:
            weights = self._of_all_heads(weights, average=call.average_attn_weights)
            weights = to_hidden_rows(weights, context=self.sharding.context) if batched else weights.squeeze(0)
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        project = self.sharding.projections
        if self.in_proj_weight is None:
            q = project["q_proj_weight"](query, self.q_proj_weight, biases[0])
            k = project["k_proj_weight"](key, self.k_proj_weight, biases[1])
            return q, k, project["v_proj_weight"](value, self.v_proj_weight, biases[2])
        fused = project["in_proj_weight"]
        if query is key and key is value:
            q, k, v = fused(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
            return q, k, v
        weights = self.in_proj_weight.chunk(3)
        q, k, v = (fused(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def _appended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return (N, S, E) keys and values with the tokens that the module appends, and the number of these tokens."""
        length = k.size(1)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat((k, self.bias_k.expand(k.size(0), 1, -1)), dim=1)
            v = torch.cat((v, self.bias_v.expand(v.size(0), 1, -1)), dim=1)
        if self.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return k, v, k.size(1) - length

    def _mask(self, call: SimpleNamespace, *, like: Tensor, appended: int) -> Tensor | None:
        """Return `attn_mask` plus `key_padding_mask` for scores, (N or 1, H or 1, L or 1, S); None without masks."""
        masks, context = [], self.sharding.context
        given, padding = (
            None if mask is None else sum_gradient_over_heads(mask, context=context)
            for mask in (call.attn_mask, call.key_padding_mask)
        )
        if given is not None and given.dim() == 3:  # (N * all heads, L, S)
            mask_NHLS = to_inner_rows(given.unflatten(0, (-1, self._heads)), context=context)
            sizes = context.sizes(self._heads, axes=context.scheme.inner)
            masks.append(mask_NHLS.split(sizes, 1)[context.world.group(context.scheme.inner).index])
        elif given is not None:
            masks.append(given[None, None])
        if padding is not None:
            mask_NS = to_inner_rows(padding.view(-1, padding.size(-1)), context=context)
            masks.append(mask_NS[:, None, None])
        added = [_additive(mask, dtype=like.dtype) for mask in masks]
        whole = sum(added[1:], added[0]) if added else None
        return functional.pad(whole, (0, appended)) if whole is not None and appended else whole

    @property
    def _heads(self) -> int:
        """Number of heads over all ranks."""
        return int(self.embed_dim // self.head_dim)

    def _of_all_heads(self, weights: Tensor, *, average: bool) -> Tensor:
        """Return the attention weights of all ranks' heads, (N, heads, L, S), or their average, (N, L, S)."""
        context = self.sharding.context
        world, axes = context.world, context.scheme.inner
        if average:
            return gradient.all_reduce(weights.sum(1), world=world, axes=axes).wait() / self._heads
        sizes = context.sizes(self._heads, axes=axes)
        return gradient.replicate(weights, world=world, axes=axes, dim=1, sizes=sizes).wait()


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Return the output of attention, (N, H, L, D), and its weights, (N, H, L, S)."""
    scores = (q * q.size(-1) ** -0.5) @ k.transpose(-2, -1)
    weights = functional.softmax(scores if mask is None else scores + mask, dim=-1)
    weights = functional.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


def _additive(mask: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return `mask` as numbers to add to scores: -inf where a boolean mask is True."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))

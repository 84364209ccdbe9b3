"""Compute torch's MultiheadAttention on the heads of one rank.

torch's class holds the matrices of q, k and v as parameters, not as linear layers. It passes them to one functional
(in eval mode, to a fused kernel) that cannot be split. So this file has a new forward over two projections, with the
arguments, masks and results of torch's forward:

    query, key, value ── in_proj (colwise) ── heads of this rank ── out_proj (rowwise)

L and S are the numbers of query and key tokens, N the rows, E and H this rank's features and heads, D a head's width.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.comm.api import autograd_collectives as gradient
from meshwise.layout.layout import Layout
from meshwise.tensor.core.activation_reshard import sum_gradient_over_heads, to_inner_rows, to_stream_rows
from meshwise.tensor.core.linear import Projection
from meshwise.tensor.core.split_context import BoundToRank, SplitContext


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
            weights = to_stream_rows(weights, context=self.sharding.context) if batched else weights.squeeze(0)
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's features of q, k and v."""
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
        """Return one mask to add to the scores, (N or 1, H or 1, L or 1, S), from both masks; None without masks."""
        masks, context = [], self.sharding.context
        given, padding = (
            None if mask is None else sum_gradient_over_heads(mask, context=context)
            for mask in (call.attn_mask, call.key_padding_mask)
        )
        if given is not None and given.dim() == 3:  # (N * all heads, L, S)
            mask_NHLS = to_inner_rows(given.unflatten(0, (-1, self._heads)), context=context)
            own = Layout((context.scheme.inner,)).local(
                (self._heads,), mesh=context.world.mesh, rank=context.world.rank
            )
            masks.append(mask_NHLS[:, own.slices[0]])
        elif given is not None:
            masks.append(given[None, None])
        if padding is not None:
            mask_NS = to_inner_rows(padding.view(-1, padding.size(-1)), context=context)
            masks.append(mask_NS[:, None, None])
        added = [_added(mask, dtype=like.dtype) for mask in masks]
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
            total: Tensor = gradient.all_reduce(weights.sum(1), world=world, axes=axes).wait()
            return total / self._heads
        sizes = context.sizes(Layout((axes,)), size=self._heads, axes=axes)
        whole: Tensor = gradient.replicate(weights, world=world, axes=axes, dim=1, sizes=sizes).wait()
        return whole


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Return the output of attention, (N, H, L, D), and its weights, (N, H, L, S)."""
    scores = (q * q.size(-1) ** -0.5) @ k.transpose(-2, -1)
    weights = functional.softmax(scores if mask is None else scores + mask, dim=-1)
    weights = functional.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


def _added(mask: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return `mask` as numbers to add to scores: -inf where a boolean mask is True."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))

"""Attention of queries on keys that may lie on other ranks, with its backward (`split_attention`, `attend`).

A `HeadExchange` has u ranks (Ulysses, arXiv 2309.14509; two levels: USP, arXiv 2405.07719). During the attention a rank
has all their tokens for H/u heads. Before and after, it has its own n tokens for all H heads:

    q (B, H, n, D) ── all-to-all over `heads` ── (B, H/u, u n, D) ── attention ── all-to-all ── (B, H, n, D)"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from meshwise.attention.kv_exchange import KeyExchange
from meshwise.attention.mask_pattern import Pattern
from meshwise.attention.tiled_attention import ScoreRules, TiledAttention, accumulator, join_sinks
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.layout.layout import TokenRanges
from meshwise.precision.dtype_policy import product_dtype


@dataclass(frozen=True)
class HeadExchange:
    """All-to-all over `axis`, from split tokens to split heads and back. `tokens`: number of tokens of each rank."""

    world: World
    axis: str
    tokens: Sequence[int]

    def heads(self, count: int) -> range:
        """Return this rank's query heads of `count`. Raises ValueError unless the ranks get equal numbers of heads."""
        ranks = len(self.tokens)
        if count % ranks:
            raise ValueError(
                f"{count} heads do not divide among the {ranks} ranks that exchange tokens for heads; take "
                "context=zigzag, or a smaller cp_heads with context=usp"
            )
        each = count // ranks
        index = self.world.group(self.axis).index
        return range(index * each, (index + 1) * each)

    def to_heads(self, x: Tensor) -> Tensor:
        """Return all tokens for this rank's heads: (B, H, n, D) -> (B, H/u, sum(tokens), D)."""
        sizes = ([x.size(1) // len(self.tokens)] * len(self.tokens), self.tokens)
        return gradient.all_to_all(x, world=self.world, axes=self.axis, split_dim=1, cat_dim=2, sizes=sizes).wait()

    def to_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens for all heads: (B, H/u, sum(tokens), D) -> (B, H, n, D)."""
        sizes = (self.tokens, [x.size(1)] * len(self.tokens))
        return gradient.all_to_all(x, world=self.world, axes=self.axis, split_dim=2, cat_dim=1, sizes=sizes).wait()

    def whole_heads(self, k: Tensor, *, queries: int) -> Tensor:
        """Return `k` with its heads repeated if they do not divide over the ranks. `queries`: number of query heads."""
        ranks, groups = len(self.tokens), queries // k.size(1)
        if k.size(1) % ranks == 0:
            return k
        shared = groups % (queries // ranks) == 0  # the query heads of a rank share one kv head
        return k.repeat_interleave(ranks // k.size(1) if shared else groups, 1)


def split_attention(
    qkv: tuple[Tensor, Tensor, Tensor], *, tiles: TiledAttention, exchange: KeyExchange
) -> tuple[Tensor, Tensor]:
    """Return the attention of this rank's queries on the keys of all ranks, and the log-sum-exp of their scores.

    Shapes: (samples, heads, queries, features) and (samples, heads, queries). `exchange`: exchange of the keys."""
    if (dtype := product_dtype(qkv[0].device.type)) is not None:  # as torch's attention does under autocast
        qkv = tuple(x.to(dtype) for x in qkv)  # type: ignore[assignment]
    result: tuple[Tensor, Tensor] = _SplitAttention.apply(*qkv, tiles.rules.mask, tiles.rules.sinks, tiles, exchange)
    return result


class _SplitAttention(torch.autograd.Function):
    """Attention with keys from an exchange, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        tiles: TiledAttention,
        exchange: KeyExchange,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        dtype = accumulator(q.dtype)
        o = q.new_zeros(*q.shape[:-1], v.size(-1), dtype=dtype)
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)
        with _plain_torch(q.device):
            if isinstance(exchange, TokenRanges):
                tiles.add(q, block=(k, v), keys=exchange, into=(o, lse))
            else:
                for keys, block in exchange.blocks(torch.cat((k, v), -1)):
                    tiles.add(q, block=_split_kv(block, k), keys=keys, into=(o, lse))
        if sinks is not None:
            join_sinks(sinks, o=o, lse=lse)
        out = o.to(q.dtype)
        ctx.tiles, ctx.exchange = tiles, exchange
        ctx.save_for_backward(q, k, v, out, lse, mask, sinks)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask, sinks = ctx.saved_tensors
        do = torch.zeros_like(out) if do is None else do
        exchange: KeyExchange = ctx.exchange
        tiles: TiledAttention = ctx.tiles
        dtype = accumulator(q.dtype)
        dq = torch.zeros_like(q, dtype=dtype)
        dmask = torch.zeros_like(mask, dtype=dtype) if ctx.needs_input_grad[3] else None

        def gradient_of(keys: TokenRanges, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return tiles.gradients(q, block=kv, keys=keys, merged=(out, lse, do, dlse), into=(dq, dmask))

        with _plain_torch(q.device):
            if isinstance(exchange, TokenRanges):
                dk, dv = gradient_of(exchange, (k, v))
            else:
                gradient = lambda keys, block: torch.cat(gradient_of(keys, _split_kv(block, k)), -1)  # noqa: E731
                dk, dv = _split_kv(exchange.backward(torch.cat((k, v), -1), gradient=gradient), k)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[4]:
            share = (sinks.to(dtype)[None, :, None] - lse).exp()
            slope = (do * out).to(dtype).sum(-1) - (0.0 if dlse is None else dlse)
            dsinks = -(share * slope).sum((0, 2)).to(sinks.dtype)
        given = None if dmask is None else dmask.to(mask.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), given, dsinks, None, None


def _split_kv(block: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys, as wide as `k`, and the values of a block."""
    return block[..., : k.size(-1)], block[..., k.size(-1) :]


@contextlib.contextmanager
def _plain_torch(device: torch.device) -> Iterator[None]:
    """Disable autocast and overrides of torch functions inside the block."""
    casts = torch.amp.is_autocast_available(device.type)
    uncast = torch.autocast(device.type, enabled=False) if casts else contextlib.nullcontext()
    with torch._C.DisableTorchFunction(), uncast:
        yield


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pattern: Pattern | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> Tensor:
    """Return the attention of `query` on `key` and `value` under a pattern; tiles without a pair are skipped.

    | query       (samples, heads, queries, features)
    | key, value  (samples, kv heads, keys, features); `heads` is a multiple of `kv heads`
    | pattern     pairs of query and key that count; None: all
    | mask        further mask, as `attn_mask` of `scaled_dot_product_attention`
    | scale       factor of the scores; None: 1/sqrt(features)
    | dropout     probability of setting an attention weight to 0; the caller passes 0 in eval mode
    | more        `softcap`: cap of the scores; `sinks`: a score per head without a value, (heads,);
    |             `score_mod`: function of score, sample, head, query and key position, as of FlexAttention;
    |             meshwise passes `draws`, the source of random numbers, and `lse=True` for a result of two tensors:
    |             the attention and the log-sum-exp of the scores, (samples, heads, queries)

    Under `cp`, the tensors have this rank's tokens only, and so have tensors of token values in the pattern."""
    given = {"pattern": pattern, "mask": mask, "scale": scale, "dropout": dropout, **more}
    if has_torch_function((query, key, value)):
        qkv = query, key, value
        return handle_torch_function(attend, qkv, *qkv, **given)
    lengths = query.size(-2), key.size(-2)
    queries, keys = map(TokenRanges.whole, lengths)
    tiles = TiledAttention(ScoreRules.of(query, lengths=lengths, given=given), queries=queries)
    result: Any = split_attention((query, key, value), tiles=tiles, exchange=keys)
    return result if given.get("lse") else result[0]  # type: ignore[no-any-return]

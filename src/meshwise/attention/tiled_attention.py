"""Attention of one block of queries on one block of keys, tile by tile, and the merge of such results.

Each pair of a query tile and a run of keys gives an output o and the log-sum-exp (lse) of its scores. Results are
merged by lse, in any order, so the blocks of keys may come in any order from any rank:

    lse = logaddexp(lse1, lse2)      o = o1 exp(lse1 - lse) + o2 exp(lse2 - lse)

The backward of a tile needs only q, k, v, the merged o and lse, and the gradient of o (FlashAttention, arXiv
2205.14135). A tile that the pattern leaves empty costs nothing. Full tiles next to each other are one run without a
mask. One of torch's fused kernels (`fused_kernels.py`) computes a run. Plain formulas serve dropout, functions of
scores, biases and lse that have gradients, and other devices and dtypes. Accumulators are at least fp32.

Shapes: q (samples, heads, queries, features), k and v (samples, kv heads, keys, features). Several query heads share a
kv head: these heads are folded into the queries, so every kernel sees equal numbers of heads."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwise.attention.fused_kernels import AttentionInput, FusedKernel, fused_kernel
from meshwise.attention.mask_pattern import Fill, Pattern, TilePair, full, pair_indices
from meshwise.layout.layout import TokenRanges, TokenTile
from meshwise.model.random_bits import IndexBlock, draw, keep_mask
from meshwise.model.random_interception import DrawSource

CPU_TILE = 256
"""Tokens in one tile of queries or of keys on the CPU."""
DEVICE_TILE = 1024
"""Tokens in one tile of queries or of keys on other devices."""


@dataclass(frozen=True)
class ScoreDropout:
    """Dropout of attention scores by a hash of a random number (`key`), sample, head, query and key position.

    `lead`: for each dim before (queries, keys), its size on this rank, and its start in the full draw.
    `shape`: sizes of (samples, heads)."""

    probability: float
    key: int
    lead: tuple[tuple[int, int], ...]
    shape: tuple[int, int]

    @classmethod
    def of(cls, probability: float, *, draws: DrawSource | None, shape: Sequence[int]) -> "ScoreDropout":
        """Return dropout for scores of the global `shape`; `draws`: None for torch's own generator."""
        samples, heads = shape[:2]
        if draws is None:
            key = int(torch.randint(2**62, ()))
            return cls(probability, key, ((samples, 0), (heads, 0)), (samples, heads))
        block = draws.part(shape, scores=True)[0]
        lead = tuple(zip(block.shape, block.starts, strict=True))[: -2 if min(shape[2:]) > 1 else None]
        return cls(probability, draws.key(), lead, (samples, heads))

    def of_heads(self, heads: range) -> "ScoreDropout":
        """Return the dropout of some of the heads."""
        lead = self.lead if len(self.lead) < 2 else (self.lead[0], (len(heads), self.lead[1][1] + heads.start))
        return replace(self, lead=lead, shape=(self.shape[0], len(heads)))

    def keep(self, pair: TilePair, *, device: torch.device) -> Tensor:
        """Return True for each score to keep, (samples, heads, queries, keys)."""
        places = tuple(torch.arange(tile.first, tile.last + 1, tile.step, device=device) for tile in pair)
        sizes = tuple(tile.stop - tile.start for tile in pair)
        block = IndexBlock(
            (*(size for size, _ in self.lead), *sizes),
            (*(start for _, start in self.lead), 0, 0),
            places=(*(None for _ in self.lead), *places),
        )
        drawn = draw(block, key=self.key, kind=keep_mask(1.0 - self.probability), device=device)
        return drawn.view(*self.shape, *sizes)


@dataclass(frozen=True, eq=False)
class ScoreRules:
    """Rules by which the scores of an attention are computed.

    | pattern    pairs of query and key that count
    | scale      factor of the products of queries and keys
    | score_mod  function of score, sample, head, query and key position that replaces each score; None: no function
    | dropout    dropout of the probabilities; None: none
    | mask       True where a pair counts, or a float to add: (samples or 1, heads or 1, queries or 1, keys or 1), with
    |            this rank's queries in their order, and all keys in the order of their positions
    | sinks      score per head that has no row in v, (heads,); None: no such scores
    | heads      numbers of this rank's query heads, for `score_mod`"""

    pattern: Pattern
    scale: float
    score_mod: Callable[..., Tensor] | None = None
    dropout: ScoreDropout | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None
    heads: range = range(0)

    @property
    def plain(self) -> bool:
        """True if the scores of a full tile count as they are."""
        return self.mask is None and self.dropout is None and self.score_mod is None

    @classmethod
    def of(cls, q: Tensor, *, lengths: tuple[int, int], given: Mapping[str, Any]) -> "ScoreRules":
        """Return the rules for a query and the other arguments of `attend`.

        `lengths`: number of queries and number of keys, over all ranks."""
        drops, scale, draws = None, given.get("scale"), given.get("draws")
        if dropout := given.get("dropout"):
            drops = ScoreDropout.of(dropout, draws=draws, shape=(*q.shape[:-2], *lengths))
        factor = 1 / math.sqrt(q.size(-1)) if scale is None else scale
        pattern, modify, cap = given.get("pattern") or full(), given.get("score_mod"), given.get("softcap")
        if cap is not None:
            modify = lambda score, *_: cap * torch.tanh(score / cap)  # noqa: E731
        heads = range(q.size(1)) if q.dim() == 4 else range(0)
        if draws is not None and given.get("of_heads"):
            draws.key()  # records that this module draws: only then do later steps set its region
            starts = draws.part((*q.shape[:2], 2, 2), scores=True)[0].starts
            heads = range(starts[1], starts[1] + len(heads)) if len(starts) == 4 else heads
        return cls(pattern.of_heads(heads), factor, modify, drops, given.get("mask"), given.get("sinks"), heads)


@dataclass(frozen=True)
class TileRun:
    """Neighbouring local keys or queries. `tile`: their positions, for a mask; None if no pair is masked."""

    start: int
    stop: int
    tile: TokenTile | None


class TiledAttention:
    """Attention of this rank's queries, which gets the keys block by block."""

    def __init__(self, rules: ScoreRules, *, queries: TokenRanges, progress: Callable[[], None] = lambda: None) -> None:
        """Keep the positions of the queries, and `progress`, which is called between tiles for pending collectives."""
        self.rules = rules
        self._queries = queries
        self._progress = progress
        self._masks: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        """Results of `_mask` under a relative pattern, by the keys' offset from the queries, steps and sizes."""
        self._plans: dict[tuple[TokenRanges, bool], list[tuple[TokenTile, list[TileRun]]]] = {}

    # ---- forward -----------------------------------------------------------------------------------------------

    def add(self, q: Tensor, *, block: tuple[Tensor, Tensor], keys: TokenRanges, into: tuple[Tensor, Tensor]) -> None:
        """Merge the attention on a block (k, v) at the positions `keys` into the accumulators."""
        k, v = block
        for tile, runs in self._plan(keys, q):
            rows = slice(tile.start, tile.stop)
            part = _fold(q[:, :, rows], k.size(1))
            o, lse = into[0][:, :, rows], into[1][:, :, rows]
            for run in runs:
                pair = None if run.tile is None else TilePair(tile, run.tile)
                new_o, new_lse = self._kernel(pair, part, *(x[:, :, run.start : run.stop] for x in (k, v))).forward()
                _merge(o, lse, new_o.reshape(o.shape), new_lse.reshape(lse.shape))
                self._progress()

    # ---- backward ----------------------------------------------------------------------------------------------

    def gradients(
        self,
        q: Tensor,
        *,
        block: tuple[Tensor, Tensor],
        keys: TokenRanges,
        merged: tuple[Tensor, Tensor, Tensor, Tensor | None],
        into: tuple[Tensor, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of a block's k and v, and add the gradients of q and of the mask to `into`.

        `merged`: the merged o and lse, and their gradients; None: lse has no gradient."""
        k, v = block
        dk, dv = (torch.zeros_like(x, dtype=into[0].dtype) for x in (k, v))
        safe_lse = merged[1].masked_fill(merged[1] == -math.inf, 0.0)
        for tile, runs in self._plan(keys, q, by_keys=True):
            here = slice(tile.start, tile.stop)
            for run in runs:
                rows = slice(run.start, run.stop)
                part, out, do = (_fold(x[:, :, rows], k.size(1)) for x in (q, merged[0], merged[2]))
                lse = safe_lse[:, :, rows].reshape(part.shape[:-1])
                dlse = None if merged[3] is None else merged[3][:, :, rows].to(lse.dtype).reshape(lse.shape)
                pair = None if run.tile is None else TilePair(run.tile, tile)
                kernel = self._kernel(pair, part, k[:, :, here], v[:, :, here], plain=dlse is not None)
                own_q, own_k, own_v, own_mask = kernel.backward(do, out, lse, dlse)
                dq = into[0][:, :, rows]
                dq += own_q.reshape(dq.shape)
                dk[:, :, here] += own_k
                dv[:, :, here] += own_v
                if into[1] is not None and pair is not None and own_mask is not None:
                    target = _mask_part(into[1], *pair)
                    target += own_mask.reshape(*dq.shape[:3], -1).sum_to_size(target.shape)
                self._progress()
        return dk, dv

    # ---- tiles -------------------------------------------------------------------------------------------------

    def _plan(self, keys: TokenRanges, q: Tensor, *, by_keys: bool = False) -> list[tuple[TokenTile, list[TileRun]]]:
        """Return each tile of queries with the runs of keys that it needs; partial tiles are cut into halves.

        Wide tiles are looked at first, so an empty one is skipped at once. `by_keys`: return tiles of keys with runs of
        queries, for the backward: its kernels are faster for many queries and few keys."""
        known = (keys, by_keys)
        if known not in self._plans:
            size = CPU_TILE if q.device.type == "cpu" else DEVICE_TILE
            outer, inner = (keys, self._queries) if by_keys else (self._queries, keys)
            runs_of = functools.partial(self._runs, by_keys=by_keys)
            fine = list(inner.tiles(size))
            coarse = [
                (wide, [one for one in fine if wide.start <= one.start < wide.stop]) for wide in inner.tiles(8 * size)
            ]
            found = []
            for tile in outer.tiles(size):
                runs = runs_of(tile, coarse)
                partial = [run.tile for run in runs if run.tile is not None] if self.rules.plain else []
                found.append((tile, [run for run in runs if run.tile not in partial]))
                for half in tile.halves() if partial else ():
                    quarters = [(one, runs_of(half, [(one, one.halves())])) for one in partial]
                    joined = [
                        TileRun(one.start, one.stop, one) if len(own) > 1 else own[0] for one, own in quarters if own
                    ]
                    found.append((half, joined))
            self._plans[known] = [(tile, runs) for tile, runs in found if runs]
        return self._plans[known]

    def _runs(
        self, tile: TokenTile, others: list[tuple[TokenTile, list[TokenTile]]], *, by_keys: bool
    ) -> list[TileRun]:
        runs: list[TileRun] = []
        pattern = self.rules.pattern
        pair = (lambda other: TilePair(other, tile)) if by_keys else (lambda other: TilePair(tile, other))
        inside = (fine for wide, fine in others if pattern.fill(pair(wide)) is not Fill.EMPTY)
        for other in itertools.chain.from_iterable(inside):
            fill = pattern.fill(pair(other))
            if fill is Fill.EMPTY:
                continue
            unmasked = fill is Fill.FULL and self.rules.plain
            if unmasked and runs and runs[-1].tile is None and runs[-1].stop == other.start:
                runs[-1] = TileRun(runs[-1].start, other.stop, None)
            else:
                runs.append(TileRun(other.start, other.stop, None if unmasked else other))
        return runs

    def _kernel(self, pair: TilePair | None, part: Tensor, k: Tensor, v: Tensor, *, plain: bool = False) -> "_Kernel":
        """Return the attention of folded queries on keys, by the plain formulas if `plain`.

        `pair`: their tiles, for a mask; None without a mask."""
        rules, mask, empty, keep, modify = self.rules, None, None, None, None
        plain |= rules.dropout is not None or rules.score_mod is not None
        plain |= rules.mask is not None and rules.mask.requires_grad
        fused = None if plain else fused_kernel(part, value_features=v.size(-1), masked=pair is not None)
        if fused is None or fused.widens:
            part, k, v = (x.to(accumulator(x.dtype)) for x in (part, k, v))
        if pair is not None:
            groups = part.size(2) // (pair.queries.stop - pair.queries.start)
            mask, empty = self._mask(*pair, groups, part, k.size(1))
            if rules.dropout is not None:
                kept = rules.dropout.keep(pair, device=part.device)
                keep = _grouped(kept, groups, k.size(1)).to(part.dtype) / (1.0 - rules.dropout.probability)
            if (change := rules.score_mod) is not None:
                places = pair_indices(pair, samples=part.size(0), heads=rules.heads, device=part.device)
                modify = lambda x: change(x.unflatten(2, (groups, -1)).flatten(1, 2), *places).reshape(x.shape)  # noqa: E731
        given = AttentionInput(part, k, v, mask, rules.scale)
        return _Kernel(given, empty=empty, keep=keep, modify=modify, fused=fused)

    def _mask(
        self, queries: TokenTile, keys: TokenTile, groups: int, part: Tensor, heads: int
    ) -> tuple[Tensor, Tensor]:
        """Return the float to add to the scores of a tile, and True for queries without keys."""
        rules, sizes = self.rules, (queries.stop - queries.start, keys.stop - keys.start)
        place = (keys.first - queries.first, queries.step, keys.step, *sizes)
        known = self._masks.get(place)
        if known is not None:
            return known
        allowed = rules.pattern.mask(TilePair(queries, keys), device=part.device)
        given = None if rules.mask is None else _mask_part(rules.mask, queries, keys)
        if given is not None and given.dtype == torch.bool:
            allowed, given = allowed & given, None
        added = part.new_zeros(()) if given is None else given.to(part.dtype)
        mask = _grouped(torch.where(allowed, added, -math.inf), groups, heads)
        found = mask, (mask == -math.inf).all(-1)
        if rules.pattern.relative and rules.mask is None:
            self._masks[place] = found
        return found


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results of `dtype` are merged: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _merge(o: Tensor, lse: Tensor, new_o: Tensor, new_lse: Tensor) -> None:
    """Merge a result, which is overwritten, into the accumulators `o` and `lse`; -inf: a query without keys."""
    total = torch.logaddexp(lse, new_lse)
    safe = total.masked_fill(total == -math.inf, 0.0)
    o.mul_((lse - safe).exp_().unsqueeze(-1)).add_(new_o.mul_((new_lse - safe).exp_().unsqueeze(-1)))
    lse.copy_(total)


def join_sinks(sinks: Tensor, *, o: Tensor, lse: Tensor) -> None:
    """Add attention sinks to the softmax, in place: `sinks` (heads,) has a score per head that has no row in v."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    o.mul_((lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


# ---- kernels -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Kernel:
    """Attention of folded queries on one run of keys.

    | empty   True for queries without keys, (samples or 1, heads or 1, queries); None: no mask
    | keep    factors of the probabilities under dropout; None: no dropout
    | modify  function that replaces the scores before the mask; None: no function
    | fused   torch's kernel, without `keep` and `modify`; None: plain formulas"""

    given: AttentionInput
    empty: Tensor | None
    keep: Tensor | None
    modify: Callable[[Tensor], Tensor] | None
    fused: FusedKernel | None

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return o and lse; a query without keys has o = 0 and lse = -inf."""
        if self.fused is not None:
            o, lse = self.fused.forward(self.given)
            return o, lse if self.empty is None else lse.masked_fill(self.empty, -math.inf)
        scores = self._scores()[0]
        highest = scores.amax(-1, keepdim=True)
        weights = (scores - highest.masked_fill(highest == -math.inf, 0.0)).exp_()
        total = weights.sum(-1, keepdim=True)
        lse = (highest.masked_fill(highest == -math.inf, 0.0) + total.log()).squeeze(-1)
        weights = weights / total.masked_fill(total == 0, 1.0)
        return (weights if self.keep is None else weights * self.keep) @ self.given.v, lse

    def backward(
        self, do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of q, k, v and the mask. A fused kernel takes no `dlse`, and has None for the mask."""
        q, k, v, _, scale = self.given
        do, o = do.to(q.dtype), o.to(q.dtype)
        if self.fused is not None:
            return *self.fused.backward(self.given, do, o, lse), None
        scores, slope = self._scores()
        weights = (scores - lse.unsqueeze(-1)).exp_()
        dropped = weights if self.keep is None else weights * self.keep
        dv = dropped.mT @ do
        dp = do @ v.mT
        if self.keep is not None:
            dp = dp * self.keep
        delta = (do * o).sum(-1) if dlse is None else (do * o).sum(-1) - dlse
        dmask = weights * (dp - delta.unsqueeze(-1))
        ds = dmask if slope is None else dmask * slope
        return ds @ k * scale, ds.mT @ q * scale, dv, dmask

    def _scores(self) -> tuple[Tensor, Tensor | None]:
        """Return the masked scores, and the derivatives of the function of the scores (None without one)."""
        q, k, _, mask, scale = self.given
        scores, slope = q @ k.mT * scale, None
        if self.modify is not None:
            with torch.enable_grad():
                before = scores.requires_grad_()
                after = self.modify(before)
                (slope,) = torch.autograd.grad(after.sum(), before, materialize_grads=True)
            scores = after.detach()
        return scores if mask is None else scores + mask, slope


def _fold(x: Tensor, heads: int) -> Tensor:
    """Return (samples, heads, groups · queries, features) of (samples, heads · groups, queries, features)."""
    return x if x.size(1) == heads else x.unflatten(1, (heads, -1)).flatten(2, 3)


def _grouped(mask: Tensor, groups: int, heads: int) -> Tensor:
    """Return a mask (…, queries, keys) for folded queries: (samples or 1, kv heads or 1, groups · queries, keys)."""
    mask = mask[(None,) * (4 - mask.dim())]
    if groups == 1:
        return mask
    if mask.size(1) != 1:
        own: Tensor = mask.unflatten(1, (heads, groups)).flatten(2, 3)
        return own
    return mask.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(2, 3)


def _mask_part(mask: Tensor, queries: TokenTile, keys: TokenTile) -> Tensor:
    rows = slice(queries.start, queries.stop) if mask.size(-2) > 1 else slice(None)
    return mask[..., rows, keys.positions if mask.size(-1) > 1 else slice(None)]

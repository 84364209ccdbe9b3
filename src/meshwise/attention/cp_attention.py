"""Compute the attentions of a model whose tokens are split over ranks (`TokenAttention`).

docs/context.md has the order of tokens and the exchange of keys for each value of `context`, `auto` included.

`work_table` counts which rank computes how many pairs of query and key, and when, under a plan. The work of an
attention is in proportion to these pairs.

`TokenState` knows which rank has which tokens of a micro-batch, and cuts the batch to this rank's: docs/context.md says
which tensors ("How a model gets global positions")."""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwise.attention.kv_exchange import DirectExchange, GatherExchange, KeyExchange, RingExchange, needed_share
from meshwise.attention.mask_pattern import Documents, Pattern, TilePair, causal, full, map_closure
from meshwise.attention.split_attention import HeadExchange, attend, split_attention
from meshwise.attention.tiled_attention import ScoreRules, TiledAttention
from meshwise.base.mesh import Mesh, even_split
from meshwise.base.tensor_tree import map_tensors, tensors
from meshwise.base.text_format import align_columns
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import Group, World
from meshwise.layout.layout import TokenRanges, token_order
from meshwise.model.random_interception import DrawSource
from meshwise.plan import Plan, PlanError

RING, HEADS = "ring", "heads"
"""Axes into which the axis `cp` is divided: `heads` exchanges tokens for heads, `ring` exchanges keys."""


@dataclass(eq=False)
class TokenState:
    """Tokens of one micro-batch.

    | length     tokens of a whole sequence
    | order      positions of the tokens of each rank along (ring, heads)
    | index      index of this rank in `order`
    | whole_of   by id of a cut tensor of the batch: the cut and the whole tensor"""

    world: World
    length: int
    order: tuple[TokenRanges, ...]
    index: int
    batch: Any = None
    """The batch as the engine gave it."""
    cut: Any = None
    """The batch with this rank's tokens."""
    whole_of: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    gathered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By id of a tensor with this rank's tokens in its last dim: the tensor, and the tensor of all tokens."""
    features: dict[int, Tensor] = field(default_factory=dict)
    """By id: tensors (samples, tokens) of one feature, from which models take the number of tokens (BART)."""
    reads_packing: bool = False
    """True if the model looks for documents in position_ids (transformers without a cache or a mask)."""
    shares: dict[Pattern, float] = field(default_factory=dict)
    """Share of other ranks' keys that a rank needs, by pattern."""

    @property
    def own(self) -> TokenRanges:
        """Positions of this rank's tokens."""
        return self.order[self.index]

    def take_batch(self, batch: Any) -> None:
        """Cut the batch to this rank's tokens."""

        def take(x: Tensor) -> Tensor:
            if x.dim() < 2 or x.size(1) != self.length:
                return x
            if x.dim() > 2 and x.size(2) == self.length and (x.dim() == 3 or not x.is_floating_point()):  # a mask
                return x
            own = self.own.take(x, dim=1).contiguous()
            self.whole_of[id(own)] = (own, x)
            return own

        self.batch, self.cut = batch, map_tensors(take, batch)

    @cached_property
    def packed(self) -> Pattern | None:
        """Documents of the batch, as `packed_documents` returns them."""
        return packed_documents(self.batch)

    def gather(self, x: Tensor, *, dim: int) -> Tensor:
        """Return a tensor with all tokens along `dim`, in the order of their positions (collective); see `gathered`."""
        known = self.gathered.get(id(x))
        if known is not None:
            return known[1]
        source = x.to(torch.uint8) if x.dtype == torch.bool else x
        sizes = [one.count for one in self.order]
        parts = gradient.all_gather(source, world=self.world, axes=(RING, HEADS), dim=dim, sizes=sizes).wait()
        whole = parts.index_select(dim, TokenRanges.joined(self.order).positions(device=x.device).argsort())
        whole = whole.bool() if x.dtype == torch.bool else whole
        if not x.requires_grad:
            self.gathered[id(x)] = (x, whole)
        return whole

    def all_values(self, x: Tensor) -> Tensor:
        """Return token values, (tokens,) or (samples, tokens), of all ranks (collective); other tensors unchanged."""
        return self.gather(x, dim=x.dim() - 1) if x.dim() in (1, 2) and x.size(-1) == self.own.count else x


def packed_documents(batch: Any) -> Pattern | None:
    """Return documents that begin where the batch's `position_ids` do not grow by 1; None if there are none."""
    given = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(given, Tensor) or given.dim() != 2 or given.is_meta:
        return None
    begins = given.diff(dim=1, prepend=given[:, :1] - 1) != 1
    return Documents(begins.cumsum(1)) if bool(begins.any()) else None


def seems_packed(batch: Any, *, length: int) -> bool:
    """Return whether sequences of `length` tokens seem to have several documents, from integer tensors of the batch.

    These are `position_ids` that restart, document numbers that grow in steps, or cu_seqlens from 0 to `length`."""
    for x in tensors(batch):
        if x.dtype not in (torch.int32, torch.int64) or x.is_meta or x.dim() != 2 or x.size(1) < 3:
            continue
        steps = x.diff(dim=1)
        # One read for which the host waits.
        grows, changes, first, last = torch.stack([(steps >= 0).all(), (steps != 0).sum(), x[0, 0], x[0, -1]]).tolist()
        numbers = x.size(1) == length and 0 < changes <= steps.numel() / 2
        if grows and (numbers or (first == 0 and last == length)):
            return True
    return packed_documents(batch) is not None


def sequence_length(batch: Any) -> int:
    """Return the number of tokens of a batch. Raises ValueError when its first tensor has no token dim."""
    first = next(tensors(batch), None)
    shape = () if first is None else tuple(first.shape)
    if first is None or first.dim() not in (2, 3) or (first.dim() == 3 and not first.is_floating_point()):
        raise ValueError(
            f"cp splits tokens, and the first tensor of the batch, of shape {shape}, is neither (samples, tokens) nor "
            "(samples, tokens, features). Put the tokens first in the batch, or use cp=1"
        )
    return shape[1]


def rank_order(order: str, *, length: int, ring: int, heads: int) -> tuple[TokenRanges, ...]:
    """Return the positions of each rank along (ring, heads): by `order` over the ring, each part cut for `heads`."""
    groups = token_order(order, length=length, parts=ring)
    return tuple(group.narrow(start, stop=stop) for group in groups for start, stop in even_split(group.count, heads))


def token_dims(x: Tensor, *, count: int) -> Iterable[int]:
    """Return the dims of an activation that may count this rank's tokens.

    | (samples, tokens)                     integers and flags
    | (samples, tokens, features)           dim 1
    | (samples, tokens, heads, features)    or (samples, heads, tokens, features): dims 1 and 2"""
    dims = x.dim()
    if dims < 2 or isinstance(x, torch.nn.Parameter):
        return ()
    if dims == 2:
        return (1,) if x.shape[1] == count and not x.is_floating_point() else ()
    return tuple(dim for dim in range(1, min(dims, 4) - 1) if x.shape[dim] == count)


ATTENTION_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("query", "key", "value", "attn_mask")),
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}
"""Arguments of torch's scaled_dot_product_attention in order, with their defaults."""
_MULTIHEAD = inspect.signature(functional.multi_head_attention_forward)
ORDER_OF: Mapping[str, str] = {"ring": "contiguous", "striped": "striped", "window": "contiguous"}
"""Token order by value of the plan's key `context`, where it is not `zigzag`."""


def head_ranks(plan: Plan) -> int:
    """Return how many neighbouring ranks of cp exchange tokens for heads."""
    return {"ulysses": plan.cp, "usp": plan.cp_heads}.get(plan.context, 1)


def context_world(world: World, *, plan: Plan) -> World:
    """Return a view of the world over the plan's mesh with the axes `ring` and `heads` in place of `cp`.

    Raises PlanError when `cp_heads` does not divide `cp`."""
    heads = head_ranks(plan)
    if plan.cp % heads:
        nearest = max(number for number in range(1, heads + 1) if plan.cp % number == 0)
        raise PlanError(f"cp_heads={heads} does not divide cp={plan.cp}. Nearest that works: 'cp_heads={nearest}'")
    axes = []
    for axis, degree in plan.with_whole_experts.mesh().axes:  # experts may divide the ranks of cp
        axes += [(RING, plan.cp // heads), (HEADS, heads)] if axis == "cp" else [(axis, degree)]
    return world.over(Mesh(tuple(axes), joint=(("cp", (RING, HEADS)),)))


@dataclass(eq=False)
class TokenAttention:
    """Attention over the tokens of all ranks, called in place of torch's functions.

    | context   the plan's key
    | dense     compute attention under a rule by torch's function with a mask, to compare with
    | draws     source of the random numbers of dropout; set when the model's draws are known"""

    world: World
    context: str
    dense: bool = False
    draws: DrawSource | None = None
    rule: Pattern | None = None
    """Pattern of a rule for the module that is running."""

    def connections(self) -> tuple[list[Group], set[tuple[int, int]]]:
        """Return the groups of this attention's collectives, and (source rank, target rank) of its messages."""
        ring = self.world.group(RING)
        steps = {"gather": (), "auto": range(1, ring.size), "window": range(1, ring.size)}.get(self.context, (1,))
        lines = {(rank, ring.ranks[(at + step) % ring.size]) for at, rank in enumerate(ring.ranks) for step in steps}
        return [ring, self.world.group(HEADS)], lines if ring.size > 1 else set()

    def __call__(self, state: TokenState | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute what `func`, one of torch's attention functions or `attend`, returns for these arguments."""
        if func is attend:
            return self._attend(state, *args, **kwargs)
        if state is None and self.rule is None:
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            bound = _MULTIHEAD.bind(*args, **kwargs)
            bound.apply_defaults()
            return self._multihead(state, **bound.arguments)
        given = {**ATTENTION_DEFAULTS, **dict(zip(ATTENTION_DEFAULTS, args, strict=False)), **kwargs}
        pattern = causal() if given["is_causal"] else None
        if self.dense:
            return self._dense(given, pattern)
        qkv = (given[name] for name in ("query", "key", "value"))
        scale, dropout = given["scale"], given["dropout_p"]
        return self._attend(state, *qkv, pattern=pattern, mask=given["attn_mask"], scale=scale, dropout=dropout)

    def _dense(self, given: dict[str, Any], pattern: Pattern | None) -> Tensor:
        """Return torch's attention with the mask of the rule of the running module."""
        assert self.rule is not None
        both = self.rule if pattern is None else pattern & self.rule
        lengths = [given[name].size(-2) for name in ("query", "key")]
        queries, keys = (next(TokenRanges.whole(length).tiles(length)) for length in lengths)
        mask = both.mask(TilePair(queries, keys), device=given["query"].device)
        mask = mask if given["attn_mask"] is None else joined_masks(mask, other=given["attn_mask"])
        return functional.scaled_dot_product_attention(**{**given, "attn_mask": mask, "is_causal": False})

    def _attend(
        self,
        state: TokenState | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pattern: Pattern | None = None,
        mask: Tensor | None = None,
        **given: Any,
    ) -> Any:
        if self.rule is not None:
            pattern = self.rule if pattern is None else pattern & self.rule
        given.setdefault("draws", self.draws)
        if state is None or len(state.order) == 1:
            return attend(q, k, v, pattern=pattern, mask=mask, **given)
        if q.dim() != 4:
            raise ValueError(
                f"attention of a query of shape {tuple(q.shape)}; under cp its dims are (samples, heads, tokens, "
                "features): reshape it"
            )
        if q.size(2) != state.own.count:
            raise ValueError(
                f"attention of {q.size(2)} queries, but this rank has {state.own.count} of {state.length} tokens under "
                'cp. Give the module all tokens by a rule, Options(tensor_rules={"NAME": "tokens whole"}), or use cp=1'
            )
        pattern = (pattern or full()).map_token_values(state.all_values)
        if given.get("score_mod") is not None:
            given["score_mod"] = map_closure(given["score_mod"], change=state.all_values)
        if given.pop("packed", False) and state.reads_packing and state.packed is not None:
            pattern = pattern & state.packed
        split = k.size(2) == state.own.count
        keys = state.length if split else k.size(2)
        mask = None if mask is None else _own_rows(mask, state=state, keys=keys)
        given |= {"pattern": pattern, "mask": mask}
        rules = ScoreRules.of(q, lengths=(state.length, keys), given=given)
        if not split:
            tiles = TiledAttention(rules, queries=state.own, progress=self.world.progress)
            result: Any = split_attention((q, k, v), tiles=tiles, exchange=TokenRanges.whole(keys))
        else:
            result = self._exchanged(state, (q, k, v), rules, lse=bool(given.get("lse")))
        return result if given.get("lse") else result[0]

    def _exchanged(
        self, state: TokenState, qkv: tuple[Tensor, Tensor, Tensor], rules: ScoreRules, *, lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention of this rank's queries on the keys of all ranks; also the log-sum-exp with `lse`."""
        ring, across = self.world.group(RING), self.world.group(HEADS)
        groups = [state.order[start : start + across.size] for start in range(0, len(state.order), across.size)]
        rounds = [TokenRanges.joined(group) for group in groups]
        q, k, v = qkv
        heads = HeadExchange(self.world, HEADS, [one.count for one in groups[ring.index]])
        if across.size > 1:
            own = heads.heads(q.size(1))
            k, v = (heads.whole_heads(x, queries=q.size(1)) for x in (k, v))
            q, k, v = (heads.to_heads(x) for x in (q, k, v))
            rules = _of_heads(rules, own, heads)
        tiles = TiledAttention(rules, queries=rounds[ring.index], progress=self.world.progress)
        out, found = split_attention((q, k, v), tiles=tiles, exchange=self._exchange(state, rounds, rules.pattern))
        if across.size > 1:
            return heads.to_tokens(out), heads.to_tokens(found.unsqueeze(-1)).squeeze(-1) if lse else None
        return out, found

    def _exchange(self, state: TokenState, rounds: list[TokenRanges], pattern: Pattern) -> KeyExchange:
        if len(rounds) == 1:
            return rounds[0]
        direct = self.context == "window"
        if self.context == "auto" and pattern.positional:
            if pattern not in state.shares:
                state.shares[pattern] = needed_share(pattern, order=rounds)
            direct = state.shares[pattern] < 0.5
        if direct:
            return DirectExchange(self.world, RING, rounds, pattern)
        return (GatherExchange if self.context == "gather" else RingExchange)(self.world, RING, rounds)

    def _multihead(self, state: TokenState | None, **given: Any) -> tuple[Tensor, None]:
        """Return the output of torch's MultiheadAttention for (tokens, samples, features); no attention weights."""
        if given["bias_k"] is not None or given["add_zero_attn"] or given["static_k"] is not None:
            raise ValueError(
                "MultiheadAttention with bias_k, add_zero_attn or static keys does not work under cp; use cp=1"
            )
        inputs = [given[name] for name in ("query", "key", "value")]
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
        if not given["use_separate_proj_weight"]:
            weights = list(given["in_proj_weight"].chunk(3))
        biases = (None,) * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
        q, k, v = (
            functional.linear(x, w, b).unflatten(-1, (given["num_heads"], -1)).permute(1, 2, 0, 3)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        )
        mask, padded = given["attn_mask"], given["key_padding_mask"]
        pattern = causal() if given["is_causal"] else None
        mask = None if given["is_causal"] or mask is None else _as_allowed(mask)
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (-1, given["num_heads"]))
        if padded is not None:
            keys = _as_allowed(padded)[:, None, None, :]
            if state is not None and keys.size(3) == state.own.count:
                keys = state.gather(keys, dim=3)
            if state is not None and mask is not None:
                mask = _own_rows(mask, state=state, keys=keys.size(3))
            mask = keys if mask is None else joined_masks(mask, other=keys)
        dropped = given["dropout_p"] if given["training"] else 0.0
        out = self._attend(state, q, k, v, pattern=pattern, mask=mask, dropout=dropped)
        mixed = out.permute(2, 0, 1, 3).flatten(2)
        return functional.linear(mixed, given["out_proj_weight"], given["out_proj_bias"]), None


def _own_rows(mask: Tensor, *, state: TokenState, keys: int) -> Tensor:
    """Return a mask (…, queries or 1, keys or 1) with this rank's queries and all keys, in the order of positions.

    The user's mask may have all tokens in a dim, or this rank's, but not in both dims: that raises ValueError."""
    mask = mask[(None,) * (4 - mask.dim())]
    own, rows, columns = state.own.count, mask.size(-2), mask.size(-1)
    fits = rows in (1, own, state.length) and columns in (1, own, keys)
    if not fits or (rows == own != 1 and columns == own != keys):
        raise ValueError(
            f"an attention mask of shape {tuple(mask.shape)} under cp, where this rank has {own} of {state.length} "
            "tokens: it needs all tokens along the keys. Use is_causal=True, or a pattern (meshwise.attention)"
        )
    if columns == own != keys:
        mask = state.gather(mask, dim=3)
    return state.own.take(mask, dim=2) if rows == state.length != own else mask


def _as_allowed(mask: Tensor) -> Tensor:
    """Return a mask of MultiheadAttention, where True forbids a pair, as a mask where True allows it."""
    return ~mask if mask.dtype == torch.bool else mask


def joined_masks(one: Tensor, *, other: Tensor) -> Tensor:
    """Return one attention mask with the effect of two; each has booleans, or floats to add."""
    if one.dtype == other.dtype == torch.bool:
        return one & other
    floats = [torch.where(x, 0.0, -torch.inf) if x.dtype == torch.bool else x for x in (one, other)]
    return floats[0] + floats[1]


def _of_heads(rules: ScoreRules, own: range, heads: HeadExchange) -> ScoreRules:
    """Return the rules for the query heads `own` and the queries of all ranks that exchange heads."""
    mask, dropout = rules.mask, rules.dropout
    if mask is not None and mask.size(2) > 1:
        source = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
        if mask.size(1) > 1:
            source = heads.to_heads(source)
        else:
            source = gradient.all_gather(source, world=heads.world, axes=HEADS, dim=2, sizes=heads.tokens).wait()
        mask = source.to(mask.dtype)
    elif mask is not None and mask.size(1) > 1:
        mask = mask[:, own.start : own.stop]
    dropout = None if dropout is None else dropout.of_heads(own)
    sinks = None if rules.sinks is None else rules.sinks[own.start : own.stop]
    numbers = rules.heads[own.start : own.stop]
    pattern = rules.pattern.of_heads(numbers)
    return dataclasses.replace(rules, pattern=pattern, dropout=dropout, mask=mask, sinks=sinks, heads=numbers)


@dataclass(frozen=True)
class WorkTable:
    """Pairs of query and key by rank and step; prints as a table of shares in percent.

    `pairs`: for each rank along the ring, its pairs with the keys of the rank `step` places before, step by step."""

    pairs: tuple[tuple[int, ...], ...]

    @property
    def imbalance(self) -> float:
        """Pairs of the rank with the most, divided by the mean."""
        of_ranks = [sum(row) for row in self.pairs]
        return max(of_ranks) * len(of_ranks) / max(1, sum(of_ranks))

    def __str__(self) -> str:
        ranks, total = len(self.pairs), max(1, sum(map(sum, self.pairs)))
        rows = [("rank", *(f"step {step}" for step in range(ranks)), "all")]
        for index, row in enumerate(self.pairs):
            cells = [f"{(index - step) % ranks}: {100 * pairs / total:.1f}" for step, pairs in enumerate(row)]
            rows.append((str(index), *cells, f"{100 * sum(row) / total:.1f}"))
        return f"{align_columns(rows)}\nslowest rank over the mean: {self.imbalance:.3f}"


def work_table(plan: Plan, *, pattern: Pattern, length: int) -> WorkTable:
    """Return the pairs that each rank of a plan's ring computes for sequences of `length` tokens."""
    heads = head_ranks(plan)
    order = rank_order(ORDER_OF.get(plan.context, "zigzag"), length=length, ring=plan.cp // heads, heads=heads)
    rounds = [TokenRanges.joined(order[start : start + heads]) for start in range(0, plan.cp, heads)]
    ranks = len(rounds)
    return WorkTable(
        tuple(
            tuple(_pairs(pattern, queries, rounds[(index - step) % ranks]) for step in range(ranks))
            for index, queries in enumerate(rounds)
        )
    )


def _pairs(pattern: Pattern, queries: TokenRanges, keys: TokenRanges) -> int:
    tiles: Sequence[TilePair] = [TilePair(row, tile) for row in queries.tiles(1024) for tile in keys.tiles(1024)]
    return sum(int(pattern.mask(pair, device=torch.device("cpu")).sum()) for pair in tiles)

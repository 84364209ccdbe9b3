"""Count which rank computes how many pairs of query and key, and when, under a plan (`work_table`).

The work of an attention is in proportion to the pairs that its pattern lets through. So the balance of the ranks, and
the share of a ring's steps that computes nothing, follow from the token order and the pattern alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwise.attention.mask_pattern import Pattern, TilePair
from meshwise.attention.token_attention import ORDER_OF, head_ranks
from meshwise.attention.token_state import rank_order
from meshwise.base.text_format import align_columns
from meshwise.layout.layout import TokenRanges
from meshwise.plan import Plan


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

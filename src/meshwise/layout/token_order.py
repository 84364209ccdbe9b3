"""Positions of the tokens that each rank has when the tokens of a sequence are split over ranks.

`TokenRanges` holds the global positions of some tokens as ranges, so a few numbers describe any length.
`token_order` splits a sequence over ranks. Under a causal mask a token's work grows with its position, so two of the
orders give each rank early and late tokens:

    | contiguous   rank r has block r of N
    | zigzag       rank r has blocks r and 2N-1-r of 2N (Llama 3, arXiv 2407.21783)
    | striped      rank r has the tokens r, r+N, r+2N, … (striped attention, arXiv 2311.09431)"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from meshwise.base.mesh import even_split


@dataclass(frozen=True)
class TokenTile:
    """Neighbouring local tokens whose global positions are evenly spaced.

    | start, stop    indices of the tokens among the tokens of the rank
    | first, last    lowest and highest global position
    | step           distance between two neighbouring positions"""

    start: int
    stop: int
    first: int
    last: int
    step: int

    @property
    def positions(self) -> slice:
        """Global positions as a slice."""
        return slice(self.first, self.last + 1, self.step)

    def halves(self) -> list["TokenTile"]:
        """Return the first and the second half of the tokens; one tile for one token."""
        low = TokenRanges(((self.first, self.stop - self.start, self.step),))
        return [
            replace(one, start=self.start + one.start, stop=self.start + one.stop)
            for one in low.tiles((low.count + 1) // 2)
        ]


@dataclass(frozen=True)
class TokenRanges:
    """Global positions of tokens, in the order in which a rank has them.

    `ranges`: for each range the first position, the number of tokens, and the distance between two positions."""

    ranges: tuple[tuple[int, int, int], ...]

    @classmethod
    def whole(cls, length: int) -> "TokenRanges":
        """Return the positions of all tokens of a sequence."""
        return cls(((0, length, 1),))

    @classmethod
    def joined(cls, parts: Sequence["TokenRanges"]) -> "TokenRanges":
        """Return the positions of several ranks, one rank after the other."""
        return cls(tuple(one for part in parts for one in part.ranges))

    @cached_property
    def count(self) -> int:
        """Number of tokens."""
        return sum(count for _, count, _ in self.ranges)

    def positions(self, *, device: torch.device | None = None) -> Tensor:
        """Return the positions as integers of shape (count,)."""
        parts = [torch.arange(first, first + count * step, step, device=device) for first, count, step in self.ranges]
        return torch.cat(parts)

    def take(self, x: Tensor, *, dim: int) -> Tensor:
        """Return the elements of `x` at these positions along `dim`."""
        index: list[slice] = [slice(None)] * (dim % x.dim())
        parts = [x[(*index, slice(first, first + count * step, step))] for first, count, step in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def narrow(self, start: int, *, stop: int) -> "TokenRanges":
        """Return the positions of the local tokens `start` to `stop` (excluded)."""
        found, passed = [], 0
        for first, count, step in self.ranges:
            low, high = max(0, start - passed), min(count, stop - passed)
            found.append((first + low * step, max(0, high - low), step))
            passed += count
        return TokenRanges(tuple(found))

    def without(self, position: int) -> "TokenRanges":
        """Return the positions below `position`."""
        return TokenRanges(
            tuple((first, min(count, len(range(first, position, step))), step) for first, count, step in self.ranges)
        )

    def tiles(self, size: int) -> Iterator[TokenTile]:
        """Yield the tokens as tiles of at most `size` tokens, none across the border of two ranges."""
        passed = 0
        for first, count, step in self.ranges:
            for low in range(0, count, size):
                high = min(low + size, count)
                yield TokenTile(passed + low, passed + high, first + low * step, first + (high - 1) * step, step)
            passed += count


def token_order(order: str, *, length: int, parts: int) -> tuple[TokenRanges, ...]:
    """Return the positions of each of `parts` ranks for a sequence of `length` tokens; some may have none."""
    if order == "contiguous":
        blocks = even_split(length, parts)
        return tuple(TokenRanges(((start, stop - start, 1),)) for start, stop in blocks)
    if order == "zigzag":
        blocks = even_split(length, 2 * parts)
        pairs = ((blocks[index], blocks[2 * parts - 1 - index]) for index in range(parts))
        return tuple(TokenRanges(tuple((start, stop - start, 1) for start, stop in pair)) for pair in pairs)
    return tuple(TokenRanges(((index, len(range(index, length, parts)), parts),)) for index in range(parts))

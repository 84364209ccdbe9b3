"""Bring keys and values to the queries of other ranks: gather all, rotate them in a ring, or send only needed ones.

docs/context.md lists how much data a rank receives. For N ranks, a rotation takes N-1 messages in the forward and
2N-1 in the backward. The next block travels while the present one is computed (ring attention, arXiv 2310.01889). The
gradients of a block travel with it, and are complete when they are back at its rank."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from meshwise.attention.mask_pattern import Fill, Pattern, TilePair
from meshwise.comm.api.world import Work, World, wait_all
from meshwise.layout.layout import TokenRanges

BlockGradient: TypeAlias = Callable[[TokenRanges, Tensor], Tensor]
"""Function of (positions of a block's keys, block) that returns the gradient of the block."""
NEEDED_TILE = 64
"""Tokens in the smallest part of a block that `DirectExchange` sends."""
TOKENS = 2
"""Dim of the tokens in a block of keys and values: (samples, kv heads, tokens, features)."""


@dataclass(frozen=True)
class _Exchange:
    """Exchange of keys between the ranks along `axis`. `order`: positions of the keys of each rank.

    A subclass has two methods with argument `own`, this rank's keys and values (samples, kv heads, tokens, features).
    `blocks` yields the positions and the tensor of each block. `backward` calls `gradient` for each block, and returns
    the gradient of `own`, summed over all ranks."""

    world: World
    axis: str
    order: Sequence[TokenRanges]

    @property
    def index(self) -> int:
        """Index of this rank along the axis."""
        return self.world.group(self.axis).index

    def empty(self, like: Tensor, tokens: int) -> Tensor:
        """Return an uninitialized block with `tokens` tokens, and other sizes as of `like`."""
        return like.new_empty((*like.shape[:TOKENS], tokens, like.size(-1)))


class GatherExchange(_Exchange):
    """Exchange in which every rank gathers all keys and values at once."""

    def blocks(self, own: Tensor) -> Iterator[tuple[TokenRanges, Tensor]]:
        """Yield the blocks of all ranks."""
        parts = [self.empty(own, keys.count) for keys in self.order]
        self.world.all_gather(own, into=parts, axes=self.axis).wait()
        yield from zip(self.order, parts, strict=True)

    def backward(self, own: Tensor, *, gradient: BlockGradient) -> Tensor:
        """Compute the gradients of all blocks, and add them up on the ranks of the blocks."""
        parts = [gradient(keys, block).contiguous() for keys, block in self.blocks(own)]
        total = torch.empty_like(parts[self.index])
        self.world.reduce_scatter(parts, into=total, axes=self.axis).wait()
        return total


class RingExchange(_Exchange):
    """Exchange in which the blocks rotate through the ranks; each rank has two blocks at a time."""

    def blocks(self, own: Tensor) -> Iterator[tuple[TokenRanges, Tensor]]:
        """Yield this rank's block, then the block of the rank before, and so on."""
        ranks, block = len(self.order), own
        for step in range(ranks):
            coming, works = self._pass_on(block, step) if step + 1 < ranks else (block, [])
            yield self.order[(self.index - step) % ranks], block
            wait_all(works)
            block = coming

    def backward(self, own: Tensor, *, gradient: BlockGradient) -> Tensor:
        """Add this rank's gradient of each block to the sum that came with the block, and pass the sum on."""
        works: list[Work] = []
        sum_here = None
        for step, (keys, block) in enumerate(self.blocks(own)):
            mine = gradient(keys, block)
            wait_all(works)
            if sum_here is not None:
                mine += sum_here
            sum_here, works = self._pass_on(mine, step)
        wait_all(works)
        assert sum_here is not None
        return sum_here

    def _pass_on(self, here: Tensor, step: int) -> tuple[Tensor, list[Work]]:
        """Start to send `here` to the next rank, and to receive the next block; return this block and the transfers."""
        ranks = len(self.order)
        after, before = (self.index + 1) % ranks, (self.index - 1) % ranks
        coming = self.empty(here, self.order[(self.index - step - 1) % ranks].count)
        works = [self.world.send(here, axis=self.axis, to=after)] if here.numel() else []
        return coming, works + ([self.world.recv(coming, axis=self.axis, source=before)] if coming.numel() else [])


@dataclass(frozen=True)
class DirectExchange(_Exchange):
    """Exchange in which a rank sends each other rank only the keys that its queries need, as the halo of a window."""

    pattern: Pattern

    def blocks(self, own: Tensor) -> Iterator[tuple[TokenRanges, Tensor]]:
        """Yield this rank's block, then the keys that each other rank sent."""
        needs, here = self._needs(), self.index
        sent, arriving = list[Work](), dict[int, tuple[Work, Tensor]]()
        for other in self._others():
            if asked := needs[other][here]:
                given = torch.cat([own[:, :, start:stop] for start, stop in asked], TOKENS)
                sent.append(self.world.send(given, axis=self.axis, to=other))
            if wanted := needs[here][other]:
                block = self.empty(own, _count(wanted))
                arriving[other] = self.world.recv(block, axis=self.axis, source=other), block
        yield self.order[here], own
        for source, (work, block) in arriving.items():
            work.wait()
            keys = self.order[source]
            yield TokenRanges.joined([keys.narrow(start, stop=stop) for start, stop in needs[here][source]]), block
        wait_all(sent)

    def backward(self, own: Tensor, *, gradient: BlockGradient) -> Tensor:
        """Send the gradients of received keys back to their ranks, and add the gradients that come back."""
        needs, here = self._needs(), self.index
        computed = [gradient(keys, block).contiguous() for keys, block in self.blocks(own)]
        total, sources = computed[0], [rank for rank in self._others() if needs[here][rank]]
        works = [self.world.send(x, axis=self.axis, to=rank) for rank, x in zip(sources, computed[1:], strict=True)]
        back = {}
        for rank in self._others():
            if needs[rank][here]:
                back[rank] = self.empty(total, _count(needs[rank][here]))
                works.append(self.world.recv(back[rank], axis=self.axis, source=rank))
        wait_all(works)
        for rank, block in back.items():
            sizes = [stop - start for start, stop in needs[rank][here]]
            for (start, stop), part in zip(needs[rank][here], block.split(sizes, TOKENS), strict=True):
                total[:, :, start:stop] += part
        return total

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self.order)) if rank != self.index]

    def _needs(self) -> list[list[list[tuple[int, int]]]]:
        """Return for each rank of queries and each rank of keys the local keys [start, stop) that are needed."""
        return [[_needed(self.pattern, queries, keys) for keys in self.order] for queries in self.order]


KeyExchange: TypeAlias = TokenRanges | GatherExchange | RingExchange | DirectExchange
"""Exchange of keys. `TokenRanges`: no exchange, because all keys are on this rank, at these positions."""


def _needed(pattern: Pattern, queries: TokenRanges, keys: TokenRanges) -> list[tuple[int, int]]:
    """Return the local keys that some query needs, as ranges of neighbouring tiles."""
    found: list[tuple[int, int]] = []
    rows = list(queries.tiles(4 * NEEDED_TILE))
    for tile in keys.tiles(NEEDED_TILE):
        if any(pattern.fill(TilePair(row, tile)) is not Fill.EMPTY for row in rows):
            if found and found[-1][1] == tile.start:
                found[-1] = (found[-1][0], tile.stop)
            else:
                found.append((tile.start, tile.stop))
    return found


def needed_share(pattern: Pattern, *, order: Sequence[TokenRanges]) -> float:
    """Return which part of the other ranks' keys a rank needs under a pattern, at most over the ranks: 0 to 1.

    `order`: positions of the tokens of each rank."""
    shares = [0.0]
    for index, queries in enumerate(order):
        others = [keys for number, keys in enumerate(order) if number != index]
        needed = sum(_count(_needed(pattern, queries, keys)) for keys in others)
        shares.append(needed / max(1, sum(keys.count for keys in others)))
    return max(shares)


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)

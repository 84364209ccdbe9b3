"""Patterns: which keys each query attends to, as values that are combined with & and |.

A pattern does not hold a mask of (queries, keys). It says of a tile of queries and keys whether the tile is empty, full
or partial, and makes the mask of a partial tile. So the work of an attention is in proportion to the tiles that are not
empty, and a rank needs masks only for its own queries. Positions are global: a pattern means the same on every rank.

    causal() & window(1024)                       sliding window (Mistral)
    causal() | prefix(64)                         prefix language model
    (window(256) | global_tokens(32))             Longformer, arXiv 2004.05150
    block_window(64, 3) | random_blocks(64, 2)    BigBird, arXiv 2007.14062
    causal() & documents(ids)                     packed documents: no attention across
"""

import enum
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from meshwise.layout.token_order import TokenTile


class Fill(enum.Enum):
    """Part of a tile's pairs of query and key that a pattern lets through."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


class Pattern:
    """Set of pairs of query and key; the base of all patterns."""

    @property
    def positional(self) -> bool:
        """True if the pattern depends on positions alone, not on the batch."""
        return True

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Return how much of a tile the pattern lets through; PARTIAL if finding out would be slow."""
        raise NotImplementedError

    def mask(self, queries: TokenTile, keys: TokenTile, *, device: torch.device) -> Tensor:
        """Return True for each pair let through: (queries, keys), or (samples, 1, queries, keys)."""
        raise NotImplementedError

    def map_token_values(self, change: Callable[[Tensor], Tensor]) -> "Pattern":
        """Return the pattern with `change` applied to its tensors of (samples, tokens)."""
        del change
        return self

    def __and__(self, other: "Pattern") -> "Pattern":
        return All((self, other))

    def __or__(self, other: "Pattern") -> "Pattern":
        return AnyOf((self, other))


@dataclass(frozen=True)
class All(Pattern):
    """Pairs that every one of the patterns lets through."""

    parts: tuple[Pattern, ...]

    @property
    def positional(self) -> bool:
        """True if every part depends on positions alone."""
        return all(part.positional for part in self.parts)

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Return EMPTY if one part is empty, FULL if all parts are full."""
        found = [part.fill(queries, keys) for part in self.parts]
        if Fill.EMPTY in found:
            return Fill.EMPTY
        return Fill.PARTIAL if Fill.PARTIAL in found else Fill.FULL

    def mask(self, queries: TokenTile, keys: TokenTile, *, device: torch.device) -> Tensor:
        """Return the conjunction of the masks."""
        return reduce(torch.logical_and, (part.mask(queries, keys, device=device) for part in self.parts))

    def map_token_values(self, change: Callable[[Tensor], Tensor]) -> Pattern:
        """Return the pattern with `change` applied to the tensors of its parts."""
        return replace(self, parts=tuple(part.map_token_values(change) for part in self.parts))

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, AnyOf) else str(part) for part in self.parts)


@dataclass(frozen=True)
class AnyOf(Pattern):
    """Pairs that at least one of the patterns lets through."""

    parts: tuple[Pattern, ...]

    @property
    def positional(self) -> bool:
        """True if every part depends on positions alone."""
        return all(part.positional for part in self.parts)

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Return FULL if one part is full, EMPTY if all parts are empty."""
        found = [part.fill(queries, keys) for part in self.parts]
        if Fill.FULL in found:
            return Fill.FULL
        return Fill.PARTIAL if Fill.PARTIAL in found else Fill.EMPTY

    def mask(self, queries: TokenTile, keys: TokenTile, *, device: torch.device) -> Tensor:
        """Return the disjunction of the masks."""
        return reduce(torch.logical_or, (part.mask(queries, keys, device=device) for part in self.parts))

    def map_token_values(self, change: Callable[[Tensor], Tensor]) -> Pattern:
        """Return the pattern with `change` applied to the tensors of its parts."""
        return replace(self, parts=tuple(part.map_token_values(change) for part in self.parts))

    def __str__(self) -> str:
        return " | ".join(map(str, self.parts))


# ---- patterns of positions ---------------------------------------------------------------------------------------


class PositionPattern(Pattern):
    """Pattern that depends on the two positions alone; a subclass defines `allows` and `fill`."""

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return True for each pair of positions (broadcast) that is let through."""
        raise NotImplementedError

    def mask(self, queries: TokenTile, keys: TokenTile, *, device: torch.device) -> Tensor:
        """Return the mask (queries, keys)."""
        return self.allows(_positions(queries, device)[:, None], _positions(keys, device)[None, :])


@dataclass(frozen=True)
class Full(PositionPattern):
    """Every pair."""

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Return FULL."""
        del queries, keys
        return Fill.FULL

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return True everywhere."""
        return (query == query) & (key == key)

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Causal(PositionPattern):
    """Keys up to the query's own position."""

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Compare the borders of the two tiles."""
        if keys.first > queries.last:
            return Fill.EMPTY
        return Fill.FULL if keys.last <= queries.first else Fill.PARTIAL

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the key is not after the query."""
        return key <= query

    def __str__(self) -> str:
        return "causal"


@dataclass(frozen=True)
class Window(PositionPattern):
    """Keys at a distance of less than `size` from the query on either side, and a multiple of `dilation`."""

    size: int
    dilation: int = 1

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Compare the distances of the two tiles' borders with the size."""
        nearest = max(keys.first - queries.last, queries.first - keys.last)
        farthest = max(queries.last - keys.first, keys.last - queries.first)
        if nearest >= self.size:
            return Fill.EMPTY
        return Fill.FULL if farthest < self.size and self.dilation == 1 else Fill.PARTIAL

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the distance is below the size and a multiple of the dilation."""
        near = (query - key).abs() < self.size
        return near if self.dilation == 1 else near & ((query - key) % self.dilation == 0)

    def __str__(self) -> str:
        return f"window:{self.size}" if self.dilation == 1 else f"dilated:{self.size}:{self.dilation}"


@dataclass(frozen=True)
class Prefix(PositionPattern):
    """The first `size` keys, for every query."""

    size: int

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Compare the keys' borders with the size."""
        del queries
        if keys.first >= self.size:
            return Fill.EMPTY
        return Fill.FULL if keys.last < self.size else Fill.PARTIAL

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the key is in the prefix."""
        return (key < self.size) & (query == query)

    def __str__(self) -> str:
        return f"prefix:{self.size}"


@dataclass(frozen=True)
class GlobalTokens(PositionPattern):
    """Pairs of which one is among the first `size` tokens: these see all tokens and are seen by all."""

    size: int

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Compare the borders of both tiles with the size."""
        if queries.first >= self.size and keys.first >= self.size:
            return Fill.EMPTY
        return Fill.FULL if queries.last < self.size or keys.last < self.size else Fill.PARTIAL

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether query or key is a global token."""
        return (key < self.size) | (query < self.size)

    def __str__(self) -> str:
        return f"global:{self.size}"


# ---- patterns of blocks ------------------------------------------------------------------------------------------


class BlockPattern(PositionPattern):
    """Pattern that is constant on blocks of `size` x `size` positions; a subclass defines `allows_block`."""

    size: int

    def allows_block(self, query: Tensor, key: Tensor) -> Tensor:
        """Return True for each pair of block numbers (broadcast) that is let through."""
        raise NotImplementedError

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the blocks of the two positions are let through."""
        return self.allows_block(query // self.size, key // self.size)

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Look at all blocks that the tile touches."""
        rows, columns = (torch.arange(tile.first // self.size, tile.last // self.size + 1) for tile in (queries, keys))
        allowed = self.allows_block(rows[:, None], columns[None, :])
        if not bool(allowed.any()):
            return Fill.EMPTY
        return Fill.FULL if bool(allowed.all()) else Fill.PARTIAL


@dataclass(frozen=True)
class BlockWindow(BlockPattern):
    """Blocks of keys at a distance of at most `reach` blocks from the query's block."""

    size: int
    reach: int = 1

    def allows_block(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the blocks are near each other."""
        return (query - key).abs() <= self.reach

    def __str__(self) -> str:
        return f"blocks:{self.size}:{self.reach}"


@dataclass(frozen=True)
class RandomBlocks(BlockPattern):
    """For each block of queries, about one in `every` blocks of keys, chosen by a hash of (seed, both numbers)."""

    size: int
    every: int
    seed: int = 0

    def allows_block(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the hash of the two block numbers is among one in `every`."""
        start = int.from_bytes(hashlib.blake2b(str(self.seed).encode(), digest_size=4).digest(), "little")
        mixed = (query * 0x9E3779B1 + start) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 15)) + key * 0x85EBCA77) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 13)) * 0x27D4EB2F) & 0xFFFFFFFF
        return ((mixed ^ (mixed >> 16)) % self.every) == 0

    def __str__(self) -> str:
        return f"random:{self.size}:{self.every}" + (f":{self.seed}" if self.seed else "")


@dataclass(frozen=True)
class Fixed(BlockPattern):
    """Own block, and the last `summary` positions of every block (Sparse Transformers, arXiv 1904.10509, "fixed")."""

    size: int
    summary: int = 1

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether both are in one block, or the key is one of the last of its block."""
        return (query // self.size == key // self.size) | (key % self.size >= self.size - self.summary)

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Return FULL inside one block, PARTIAL for any other tile."""
        blocks = {border // self.size for tile in (queries, keys) for border in (tile.first, tile.last)}
        return Fill.FULL if len(blocks) == 1 else Fill.PARTIAL

    def __str__(self) -> str:
        return f"fixed:{self.size}:{self.summary}"


# ---- patterns of the batch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Documents(Pattern):
    """Pairs of one document. `ids`: document number of each token, (samples, tokens)."""

    ids: Tensor

    @property
    def positional(self) -> bool:
        """False: it depends on the batch."""
        return False

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Compare the lowest and highest numbers in the two tiles, sample by sample."""
        if self.ids.is_meta:
            return Fill.PARTIAL
        rows, columns = self.ids[:, queries.positions], self.ids[:, keys.positions]
        (low, high), (least, most) = rows.aminmax(dim=1), columns.aminmax(dim=1)
        if bool(((high < least) | (most < low)).all()):
            return Fill.EMPTY
        same = (low == high) & (least == most) & (low == least)
        return Fill.FULL if bool(same.all()) else Fill.PARTIAL

    def mask(self, queries: TokenTile, keys: TokenTile, *, device: torch.device) -> Tensor:
        """Return (samples, 1, queries, keys)."""
        rows, columns = self.ids[:, queries.positions], self.ids[:, keys.positions]
        return (rows[:, None, :, None] == columns[:, None, None, :]).to(device)

    def map_token_values(self, change: Callable[[Tensor], Tensor]) -> Pattern:
        """Return the pattern of changed document numbers."""
        return Documents(change(self.ids))

    def __str__(self) -> str:
        return "documents"


@dataclass(frozen=True, eq=False)
class Restarts(Documents):
    """Pairs of one packed document, as a model of transformers found them in the tokens that it had.

    Where tokens are split over ranks, the model's own numbers are wrong, and those of the whole batch replace them.
    """

    def map_token_values(self, change: Callable[[Tensor], Tensor]) -> Pattern:
        """Return every pair."""
        del change
        return Full()


@dataclass(frozen=True, eq=False)
class Padding(Pattern):
    """Keys that are not padding. `valid`: True (or 1) for each token that counts, (samples, tokens)."""

    valid: Tensor

    @property
    def positional(self) -> bool:
        """False: it depends on the batch."""
        return False

    def fill(self, queries: TokenTile, keys: TokenTile) -> Fill:
        """Look at the keys of the tile."""
        del queries
        if self.valid.is_meta:
            return Fill.PARTIAL
        columns = self.valid[:, keys.positions].bool()
        if not bool(columns.any()):
            return Fill.EMPTY
        return Fill.FULL if bool(columns.all()) else Fill.PARTIAL

    def mask(self, queries: TokenTile, keys: TokenTile, *, device: torch.device) -> Tensor:
        """Return (samples, 1, queries, keys)."""
        columns = self.valid[:, keys.positions].bool().to(device)
        return columns[:, None, None, :].expand(-1, 1, queries.stop - queries.start, -1)

    def map_token_values(self, change: Callable[[Tensor], Tensor]) -> Pattern:
        """Return the pattern of changed flags."""
        return Padding(change(self.valid))

    def __str__(self) -> str:
        return "padding"


def _positions(tile: TokenTile, device: torch.device) -> Tensor:
    return torch.arange(tile.first, tile.last + 1, tile.step, device=device)


# ---- makers and text ---------------------------------------------------------------------------------------------


def full() -> Pattern:
    """Return the pattern of every pair."""
    return Full()


def causal() -> Pattern:
    """Return the pattern of keys up to the query's own position."""
    return Causal()


def window(size: int) -> Pattern:
    """Return the pattern of keys at a distance of less than `size`; with `causal()`, the last `size` keys."""
    return Window(_positive(size, "window"))


def dilated(size: int, dilation: int) -> Pattern:
    """Return the pattern of keys at a distance of less than `size` that is a multiple of `dilation`."""
    return Window(_positive(size, "dilated"), _positive(dilation, "dilated"))


def prefix(size: int) -> Pattern:
    """Return the pattern of the first `size` keys."""
    return Prefix(_positive(size, "prefix"))


def global_tokens(size: int) -> Pattern:
    """Return the pattern of pairs of which one is among the first `size` tokens."""
    return GlobalTokens(_positive(size, "global"))


def block_window(size: int, reach: int = 1) -> Pattern:
    """Return the pattern of blocks of `size` keys at a distance of at most `reach` blocks."""
    return BlockWindow(_positive(size, "blocks"), reach)


def random_blocks(size: int, every: int, *, seed: int = 0) -> Pattern:
    """Return the pattern of about one in `every` blocks of `size` keys, chosen by a hash of the block numbers."""
    return RandomBlocks(_positive(size, "random"), _positive(every, "random"), seed)


def fixed(size: int, summary: int = 1) -> Pattern:
    """Return the pattern of the own block and the last `summary` keys of every block."""
    return Fixed(_positive(size, "fixed"), _positive(summary, "fixed"))


def documents(ids: Tensor) -> Pattern:
    """Return the pattern of pairs inside one document. `ids`: document number of each token, (samples, tokens)."""
    return Documents(ids)


def padding(valid: Tensor) -> Pattern:
    """Return the pattern of keys that count. `valid`: True or 1 for each such token, (samples, tokens)."""
    return Padding(valid)


def _positive(size: int, name: str) -> int:
    if size < 1:
        raise ValueError(f"the pattern {name} has a size of {size}; give 1 or more")
    return size


def parse_pattern(text: str) -> Pattern:
    """Return the pattern of a text: words joined by + (either) and & (both), & first, as in `causal&window:64+global:2`.

    The words are `full`, `causal`, `window:SIZE`, `dilated:SIZE:DILATION`, `prefix:SIZE`, `global:SIZE`,
    `blocks:SIZE:REACH`, `random:SIZE:EVERY:SEED` and `fixed:SIZE:SUMMARY`. Raises ValueError for another text.
    """
    return _joined([_joined([_word(word) for word in part.split("&")], All) for part in text.split("+")], AnyOf)


def _joined(parts: Sequence[Pattern], kind: Callable[[tuple[Pattern, ...]], Pattern]) -> Pattern:
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


def _word(text: str) -> Pattern:
    name, *numbers = text.strip().split(":")
    kinds: dict[str, tuple[Callable[..., Pattern], int, int]] = {
        "full": (full, 0, 0),
        "causal": (causal, 0, 0),
        "window": (window, 1, 1),
        "dilated": (dilated, 2, 2),
        "prefix": (prefix, 1, 1),
        "global": (global_tokens, 1, 1),
        "blocks": (block_window, 1, 2),
        "random": (lambda size, every, seed=0: random_blocks(size, every, seed=seed), 2, 3),
        "fixed": (fixed, 1, 2),
    }
    if name not in kinds:
        raise ValueError(
            f"{name!r} in the pattern {text!r} is not one of {' '.join(kinds)}; write it as in window:1024"
        )
    make, least, most = kinds[name]
    if not least <= len(numbers) <= most or not all(number.isdigit() for number in numbers):
        raise ValueError(f"the pattern {text!r} needs {least} to {most} whole numbers after {name}, as in window:1024")
    return make(*map(int, numbers))

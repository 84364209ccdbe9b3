"""Patterns: which keys each query attends to, as values that are combined with & and |.

A pattern does not hold a mask of (queries, keys). It says of a tile of queries and keys whether the tile is empty, full
or partial, and makes the mask of a partial tile. So the work of an attention is in proportion to the tiles that are not
empty, and a rank needs masks only for its own queries. Positions are global: a pattern means the same on every rank.
docs/context.md has the patterns of published models ("Sparse attention")."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from types import CellType, FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from meshwise.layout.layout import TokenTile


class Fill(enum.Enum):
    """Part of a tile's pairs of query and key that a pattern lets through."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


class TilePair(NamedTuple):
    """Tile of an attention: some queries and some keys."""

    queries: TokenTile
    keys: TokenTile


Change: TypeAlias = Callable[[Tensor], Tensor]


class Pattern:
    """Set of pairs of query and key; the base of all patterns."""

    positional: bool = True
    """True if the pattern depends on positions alone, not on the batch."""
    relative: bool = False
    """True if the pattern depends on the difference of the positions alone."""

    def fill(self, pair: TilePair) -> Fill:
        """Return how much of a tile the pattern lets through; PARTIAL if finding out would be slow."""
        raise NotImplementedError

    def mask(self, pair: TilePair, *, device: torch.device) -> Tensor:
        """Return True for each pair let through: (queries, keys), or (samples, 1, queries, keys)."""
        raise NotImplementedError

    def map_token_values(self, change: Change) -> "Pattern":  # noqa: ARG002 - a pattern of positions has no such tensor
        """Return the pattern with `change` applied to its tensors of token values, (samples, tokens)."""
        return self

    def of_heads(self, heads: range) -> "Pattern":  # noqa: ARG002 - most patterns are the same for all heads
        """Return the pattern for the query heads `heads` of all heads."""
        return self

    def __and__(self, other: "Pattern") -> "Pattern":
        return Combined((self, other), every=True)

    def __or__(self, other: "Pattern") -> "Pattern":
        return Combined((self, other), every=False)


@dataclass(frozen=True)
class Combined(Pattern):
    """Pairs that every part lets through or, without `every`, at least one part."""

    parts: tuple[Pattern, ...]
    every: bool

    @property
    def positional(self) -> bool:  # type: ignore[override]
        """True if every part depends on positions alone."""
        return all(part.positional for part in self.parts)

    @property
    def relative(self) -> bool:  # type: ignore[override]
        """True if every part depends on the difference of the positions alone."""
        return all(part.relative for part in self.parts)

    def fill(self, pair: TilePair) -> Fill:
        """Combine the fills of the parts."""
        found = [part.fill(pair) for part in self.parts]
        decisive, other = (Fill.EMPTY, Fill.FULL) if self.every else (Fill.FULL, Fill.EMPTY)
        if decisive in found:
            return decisive
        return Fill.PARTIAL if Fill.PARTIAL in found else other

    def mask(self, pair: TilePair, *, device: torch.device) -> Tensor:
        """Combine the masks of the parts."""
        join = torch.logical_and if self.every else torch.logical_or
        return reduce(join, (part.mask(pair, device=device) for part in self.parts))

    def map_token_values(self, change: Change) -> Pattern:
        """Return the pattern with `change` applied to the tensors of its parts."""
        return replace(self, parts=tuple(part.map_token_values(change) for part in self.parts))

    def of_heads(self, heads: range) -> Pattern:
        """Return the pattern of the parts for the query heads `heads`."""
        return replace(self, parts=tuple(part.of_heads(heads) for part in self.parts))

    def __str__(self) -> str:
        if not self.every:
            return "+".join(map(str, self.parts))
        return "&".join(f"({one})" if isinstance(one, Combined) and not one.every else str(one) for one in self.parts)


# ---- patterns of positions ---------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """Kind of a pattern of positions, as functions of a tile or of positions, and of the pattern's numbers.

    | allows      True for each pair of positions q, k that is let through
    | some, all   whether a tile (queries q0 to q1, keys k0 to k1) may have such pairs, and whether it has all pairs
    | numbers     how many numbers follow the kind's name in a text"""

    allows: Callable[..., Tensor]
    some: Callable[..., bool]
    all: Callable[..., bool]
    numbers: int


def _hash(query: Tensor, key: Tensor, seed: int) -> Tensor:
    """Return a hash of (seed, query block, key block), 32 bits."""
    mixed = (query * 0x9E3779B1 + seed * 0x7FEB352D + 0x2545F491) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) + key * 0x85EBCA77) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0x27D4EB2F) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


def _near(q0: int, q1: int, k0: int, k1: int) -> int:
    """Return the smallest distance between a query and a key of a tile; 0 or less if they overlap."""
    return max(k0 - q1, q0 - k1)


def _far(q0: int, q1: int, k0: int, k1: int) -> int:
    return max(q1 - k0, k1 - q0)


def _of_blocks(allows: Callable[..., Tensor], numbers: int) -> _Kind:
    """Return a kind that lets through whole blocks. `allows`: as in `_Kind`, but for the indices of two blocks."""

    def table(q0: int, q1: int, k0: int, k1: int, size: int, *more: int) -> Tensor:
        rows, columns = torch.arange(q0 // size, q1 // size + 1), torch.arange(k0 // size, k1 // size + 1)
        return allows(rows[:, None], columns[None, :], *more)

    return _Kind(
        lambda q, k, size, *more: allows(q // size, k // size, *more),
        lambda *given: bool(table(*given).any()),
        lambda *given: bool(table(*given).all()),
        numbers,
    )


_KINDS: Mapping[str, _Kind] = {  # q == q: True in the shape of q
    "full": _Kind(lambda q, k: (q == q) & (k == k), lambda *_: True, lambda *_: True, 0),
    "causal": _Kind(lambda q, k: k <= q, lambda _q0, q1, k0, _k1: k0 <= q1, lambda q0, _q1, _k0, k1: k1 <= q0, 0),
    "window": _Kind(
        lambda q, k, size: (q - k).abs() < size,
        lambda *given: _near(*given[:4]) < given[4],
        lambda *given: _far(*given[:4]) < given[4],
        1,
    ),
    "dilated": _Kind(
        lambda q, k, size, step: ((q - k).abs() < size) & ((q - k) % step == 0),
        lambda *given: _near(*given[:4]) < given[4],
        lambda *given: _far(*given[:4]) < given[4] and given[5] == 1,
        2,
    ),
    "prefix": _Kind(
        lambda q, k, size: (k < size) & (q == q),
        lambda _q0, _q1, k0, _k1, size: k0 < size,
        lambda _q0, _q1, _k0, k1, size: k1 < size,
        1,
    ),
    "global": _Kind(
        lambda q, k, size: (k < size) | (q < size),
        lambda q0, _q1, k0, _k1, size: min(q0, k0) < size,
        lambda _q0, q1, _k0, k1, size: min(q1, k1) < size,
        1,
    ),
    "blocks": _of_blocks(lambda q, k, reach: (q - k).abs() <= reach, 2),
    "random": _of_blocks(lambda q, k, every, seed: _hash(q, k, seed) % every == 0, 3),
    "fixed": _Kind(
        lambda q, k, size, summary: (q // size == k // size) | (k % size >= size - summary),
        lambda *_: True,
        lambda q0, q1, k0, k1, size, _summary: len({border // size for border in (q0, q1, k0, k1)}) == 1,
        2,
    ),
}
"""Kinds of patterns by the word in a text."""


@dataclass(frozen=True)
class PositionPattern(Pattern):
    """Pattern that depends on the two positions alone: a word of `_KINDS` and its numbers."""

    kind: str
    numbers: tuple[int, ...] = ()

    @property
    def relative(self) -> bool:  # type: ignore[override]
        """True for kinds that compare the two positions with each other only."""
        return self.kind in ("full", "causal", "window", "dilated")

    def __post_init__(self) -> None:
        if any(number < 1 for number in self.numbers[:2]):
            raise ValueError(f"the pattern {self} has a number below 1; give 1 or more")

    def fill(self, pair: TilePair) -> Fill:
        """Compare the borders of the two tiles."""
        borders = (pair.queries.first, pair.queries.last, pair.keys.first, pair.keys.last)
        kind = _KINDS[self.kind]
        if not kind.some(*borders, *self.numbers):
            return Fill.EMPTY
        return Fill.FULL if kind.all(*borders, *self.numbers) else Fill.PARTIAL

    def mask(self, pair: TilePair, *, device: torch.device) -> Tensor:
        """Return the mask (queries, keys)."""
        q, k = (torch.arange(tile.first, tile.last + 1, tile.step, device=device) for tile in pair)
        return _KINDS[self.kind].allows(q[:, None], k[None, :], *self.numbers)

    def __str__(self) -> str:
        return ":".join((self.kind, *map(str, self.numbers)))


# ---- patterns of the batch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TokenPattern(Pattern):
    """Pattern that depends on a value of each token: `values` (samples, tokens)."""

    values: Tensor
    positional = False

    def map_token_values(self, change: Change) -> Pattern:
        """Return the pattern of changed values."""
        return replace(self, values=change(self.values))

    def __str__(self) -> str:
        return type(self).__name__.lower()


class Documents(TokenPattern):
    """Pairs of one document. `values`: document number of each token."""

    def fill(self, pair: TilePair) -> Fill:
        """Compare the lowest and highest numbers in the two tiles, sample by sample."""
        if self.values.is_meta:
            return Fill.PARTIAL
        (low, high), (least, most) = (self.values[:, tile.positions].aminmax(dim=1) for tile in pair)
        if bool(((high < least) | (most < low)).all()):
            return Fill.EMPTY
        return Fill.FULL if bool(((low == high) & (least == most) & (low == least)).all()) else Fill.PARTIAL

    def mask(self, pair: TilePair, *, device: torch.device) -> Tensor:
        """Return (samples, 1, queries, keys)."""
        rows, columns = (self.values[:, tile.positions].to(device) for tile in pair)
        return rows[:, None, :, None] == columns[:, None, None, :]


class Restarts(Documents):
    """Pairs of one packed document, from document numbers that a model of transformers counted itself.

    Under cp the model saw only this rank's tokens, so its numbers are wrong, and `packed_documents` replaces them."""

    def map_token_values(self, change: Change) -> Pattern:  # noqa: ARG002 - the numbers are not used
        """Return the pattern of every pair."""
        return full()


class Padding(TokenPattern):
    """Keys that are not padding. `values`: True (or 1) for each token that counts."""

    def fill(self, pair: TilePair) -> Fill:
        """Look at the keys of the tile."""
        if self.values.is_meta:
            return Fill.PARTIAL
        columns = self.values[:, pair.keys.positions].bool()
        if not bool(columns.any()):
            return Fill.EMPTY
        return Fill.FULL if bool(columns.all()) else Fill.PARTIAL

    def mask(self, pair: TilePair, *, device: torch.device) -> Tensor:
        """Return (samples, 1, queries, keys)."""
        columns = self.values[:, pair.keys.positions].bool().to(device)
        return columns[:, None, None, :].expand(-1, 1, pair.queries.stop - pair.queries.start, -1)


# ---- patterns of a function --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MaskFunction(Pattern):
    """Pairs that a `mask_mod` of FlexAttention (arXiv 2412.05496) lets through.

    | allows    True for each pair that counts, by indices of sample and head, and positions of query and key
    | samples   number of samples, or 1 if the pairs are the same in all
    | heads     numbers of the query heads; None: the pairs are the same in all
    | device    device of the tensors that the function reads"""

    allows: Callable[..., Tensor]
    samples: int
    heads: range | None
    device: torch.device
    positional = False

    def fill(self, pair: TilePair) -> Fill:
        """Evaluate the function on the tile, unless it is large."""
        if self.device.type == "meta" or pair.keys.stop - pair.keys.start > _EVALUATED:
            return Fill.PARTIAL
        mask = self.mask(pair, device=self.device)
        if not bool(mask.any()):
            return Fill.EMPTY
        return Fill.FULL if bool(mask.all()) else Fill.PARTIAL

    def mask(self, pair: TilePair, *, device: torch.device) -> Tensor:
        """Return (samples, heads, queries, keys); samples or heads are 1 if the pairs are the same for all."""
        heads = range(1) if self.heads is None else self.heads
        places = pair_indices(pair, samples=self.samples, heads=heads, device=device)
        return self.allows(*places).expand(torch.broadcast_shapes(*(place.shape for place in places)))

    def map_token_values(self, change: Change) -> Pattern:
        """Return the pattern of the function with `change` applied to the tensors in its closure."""
        return replace(self, allows=map_closure(self.allows, change=change))

    def of_heads(self, heads: range) -> Pattern:
        """Return the pattern for some heads, if it depends on them."""
        return self if self.heads is None else replace(self, heads=heads)


_EVALUATED = 1024
"""Most keys of a tile on which a function is evaluated to find out whether the tile is empty."""


def pair_indices(pair: TilePair, *, samples: int, heads: range, device: torch.device) -> tuple[Tensor, ...]:
    """Return the indices of samples, heads, queries and keys of a tile, each along its own dim of four."""
    spans = (range(samples), heads, *(range(tile.first, tile.last + 1, tile.step) for tile in pair))
    lines = (torch.arange(span.start, span.stop, span.step, device=device) for span in spans)
    return tuple(line[(slice(None), *(None,) * (3 - dim))] for dim, line in enumerate(lines))


def map_closure(value: Any, *, change: Change) -> Any:
    """Return a function with `change` applied to integer and boolean tensors in its closure and in functions there."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else change(value)
    if isinstance(value, tuple | list):
        return type(value)(map_closure(one, change=change) for one in value)
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    cells = tuple(CellType(map_closure(cell.cell_contents, change=change)) for cell in value.__closure__)
    made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__ = value.__kwdefaults__
    return made


# ---- makers and text ---------------------------------------------------------------------------------------------


def full() -> Pattern:
    """Return the pattern of every pair."""
    return PositionPattern("full")


def causal() -> Pattern:
    """Return the pattern of keys up to the query's own position."""
    return PositionPattern("causal")


def window(size: int) -> Pattern:
    """Return the pattern of keys at a distance of less than `size`; with `causal()`, the last `size` keys."""
    return PositionPattern("window", (size,))


def dilated(size: int, *, step: int) -> Pattern:
    """Return the pattern of keys at a distance of less than `size` that is a multiple of `step`."""
    return PositionPattern("dilated", (size, step))


def prefix(size: int) -> Pattern:
    """Return the pattern of the first `size` keys."""
    return PositionPattern("prefix", (size,))


def global_tokens(size: int) -> Pattern:
    """Return the pattern of pairs whose query or key is among the first `size` tokens."""
    return PositionPattern("global", (size,))


def blocks(size: int, *, reach: int = 1) -> Pattern:
    """Return the pattern of blocks of `size` keys at a distance of at most `reach` blocks."""
    return PositionPattern("blocks", (size, reach))


def random_blocks(size: int, *, every: int, seed: int = 0) -> Pattern:
    """Return the pattern of about one in `every` blocks of `size` keys, by a hash of the seed and both blocks."""
    return PositionPattern("random", (size, every, seed))


def fixed(size: int, *, summary: int = 1) -> Pattern:
    """Return the pattern of the query's own block of `size` keys, and the last `summary` keys of every block."""
    return PositionPattern("fixed", (size, summary))


def documents(ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Pattern:
    """Return the pattern of pairs inside one document. Raises ValueError if both arguments are None.

    | ids          document number of each token, (samples, tokens)
    | cu_seqlens   in place of `ids`: first token of each document and, once or more, the number of all tokens,
    |              (samples, documents + 1)"""
    if cu_seqlens is not None and cu_seqlens.is_meta:
        return full()
    if cu_seqlens is not None:
        places = torch.arange(int(cu_seqlens[0, -1]), device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        ids = torch.searchsorted(cu_seqlens, places.expand(len(cu_seqlens), -1).contiguous(), right=True)
    if ids is None:
        raise ValueError("documents() needs document numbers: documents(ids) or documents(cu_seqlens=…)")
    return Documents(ids)


def padding(valid: Tensor) -> Pattern:
    """Return the pattern of keys that count. `valid`: True or 1 for each such token, (samples, tokens)."""
    return Padding(valid)


def parse_pattern(text: str) -> Pattern:
    """Return the pattern of a text such as `causal&window:64+global:2`: & joins words first (both), then + (either).

    docs/context.md has the words and their numbers ("Sparse attention"). Raises ValueError for another text."""

    def joined(texts: list[str], read: Callable[[str], Pattern], *, every: bool) -> Pattern:
        parts = tuple(map(read, texts))
        return parts[0] if len(parts) == 1 else Combined(parts, every)

    return joined(text.split("+"), lambda part: joined(part.split("&"), _word, every=True), every=False)


def _word(text: str) -> Pattern:
    name, *numbers = text.strip().split(":")
    if name not in _KINDS:
        raise ValueError(f"{name!r} in pattern {text!r} is not one of {' '.join(_KINDS)}; write it as in window:1024")
    count = _KINDS[name].numbers
    if len(numbers) != count or not all(number.isdigit() for number in numbers):
        raise ValueError(f"pattern {text!r} needs {count} whole numbers after {name}, as in window:1024 or blocks:64:1")
    return PositionPattern(name, tuple(map(int, numbers)))

"""Compute random values that depend on a key and on an element's index in the full tensor alone.

torch's generators are sequences: an element's number depends on all earlier draws, so it changes with the tensor's
shape and the rank's slice. Here the bits of an element are a hash of a key and of the element's index in the full
tensor. The bits are the same in any slice and on any device.

    key, index along every dim but the last ──► 64 bits for each row:  a (32 bits), c (32 bits, odd)
    key, index along the last dim           ──► 32 bits for each column: b
    word = c · f((a xor b) · m),   f(x) = x xor x>>15            32-bit arithmetic, six passes over the tensor

Rows and columns are hashed by the finalizer of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, 2014). So the last line combines mixed bits, and two rows rarely share a multiplier c. The hash is
good enough for masks and noise, not for cryptography."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB
_COLUMNS = 0x2545F4914F6CDD1D  # turns a draw's key into another one, for the columns
WORD_FACTOR = 0x2C1B3C6D
"""The factor m of a word."""

BLOCK = 2**16
"""Number of words computed at a time on the CPU, so that they stay in the cache; a GPU computes all words at once."""


@dataclass(frozen=True)
class IndexBlock:
    """A slice of a full tensor: along dim d, the `shape[d]` elements from `starts[d]` on.

    `places`: per dim, the indices in the full tensor, or None if they are consecutive; () if all dims have None."""

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    places: tuple[Tensor | None, ...] = ()

    def indices(self, dim: int, *, device: torch.device) -> Tensor:
        """Return the index of each element along a dim in the full tensor, plus 1."""
        place = self.places[dim] if self.places else None
        if place is not None:
            return place.to(device) + 1
        return torch.arange(self.starts[dim] + 1, self.starts[dim] + self.shape[dim] + 1, device=device)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Distribution:
    """Distribution of random values: `write(words, out)` fills `out` (of `dtype`) from uniform random int32 `words`."""

    dtype: torch.dtype
    write: Callable[[Tensor, Tensor], object]


def draw(part: IndexBlock, *, key: int, kind: Distribution, device: torch.device, into: Tensor | None = None) -> Tensor:
    """Return random values of `kind` for a slice of a full tensor; the slice has at least two dims.

    | key    any signed 64-bit integer; equal keys give equal draws
    | into   contiguous tensor to fill and return, of the kind's dtype and the slice's size; None: a new tensor"""
    filled = torch.empty(part.shape, dtype=kind.dtype, device=device) if into is None else into
    _fill(filled.view(1, *part.shape).flatten(1, -2), part=part, keys=[key], kind=kind)
    return filled


def draw_many(part: IndexBlock, *, keys: Sequence[int], kind: Distribution, device: torch.device) -> Tensor:
    """Return the values of `draw` for each key, (keys, *part.shape). One torch operation serves several keys."""
    filled = torch.empty((len(keys), *part.shape), dtype=kind.dtype, device=device)
    _fill(filled.flatten(1, -2), part=part, keys=keys, kind=kind)
    return filled


def shaped(drawn: Tensor, *, shape: Sequence[int], turned: bool) -> Tensor:
    """Return `drawn` in the shape `shape`. `turned`: True if `drawn` has the first two dims in the opposite order."""
    return drawn.view(shape[1], shape[0], *shape[2:]).transpose(0, 1) if turned else drawn.view(shape)


def _fill(lines: Tensor, *, part: IndexBlock, keys: Sequence[int], kind: Distribution) -> None:
    """Fill `lines` (keys, rows, columns) with random values of `kind` for a slice, one draw per key."""
    first, factor, column = mask_numbers(part, keys=keys, device=lines.device)
    number, height, width = lines.shape
    together, step = number, max(1, height)
    if lines.device.type == "cpu":
        together, step = max(1, BLOCK // max(1, height * width)), max(1, BLOCK // max(1, width))
    for some in range(0, number, together):
        these = slice(some, some + together)
        for low in range(0, height, step):
            part_of = these, slice(low, low + step)
            word = first[part_of] ^ column[these]
            word *= WORD_FACTOR
            word ^= word >> 15
            word *= factor[part_of]
            kind.write(word, lines[part_of])


def mask_numbers(part: IndexBlock, *, keys: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers a and c of the rows of a slice, (keys, rows, 1), and b of its columns, (keys, 1, columns).

    They are int32, and the rows are all dims but the last. As in splitmix64, an index is multiplied by `_GOLDEN`, so
    that neighbours differ in many bits."""
    key = torch.tensor(keys, dtype=torch.int64).to(device, non_blocking=True)
    ends = [part.indices(dim, device=device).mul_(_GOLDEN) for dim in range(len(part.shape))]
    column = _high(_mixed((key ^ _COLUMNS).unsqueeze(-1) + ends[-1]))
    rows = key
    for index in ends[:-1]:
        rows = _mixed(rows.unsqueeze(-1) + index)
    rows = rows.flatten(1).unsqueeze(-1)
    return _high(rows), _high(rows << 32) | 1, column.unsqueeze(1)


def largest_kept(probability: float) -> int:
    """Return the largest word of the elements that a mask keeps with this probability; below -2**31 it keeps none."""
    return round(probability * 2**32) - 2**31 - 1


@lru_cache(maxsize=256)
def keep_mask(probability: float, *, dtype: torch.dtype = torch.bool, scaled: bool = False) -> Distribution:
    """Return the distribution of dropout masks: 1 (1 / probability if `scaled`) with about this probability, else 0."""
    most = largest_kept(probability)
    if most < -(2**31):
        return Distribution(dtype, lambda _word, out: out.zero_())
    if scaled:
        return Distribution(dtype, lambda word, out: torch.le(word, most, out=out).mul_(1.0 / probability))
    return Distribution(dtype, lambda word, out: torch.le(word, most, out=out))


def uniform(dtype: torch.dtype) -> Distribution:
    """Return the uniform distribution over [0, 1), on a grid of 2^-32 or of the dtype's precision if coarser."""
    bits = min(32, round(-math.log2(torch.finfo(dtype).eps)) + 1)
    return Distribution(
        dtype, lambda word, out: out.copy_(word >> (32 - bits)).add_(2 ** (bits - 1)).mul_(math.ldexp(1, -bits))
    )


def normal(dtype: torch.dtype) -> Distribution:
    """Return the standard normal distribution: its inverse CDF at the middle of each of 2^32 intervals."""
    return Distribution(dtype, lambda word, out: out.copy_(_middle(word).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))))


def exponential(dtype: torch.dtype) -> Distribution:
    """Return the exponential distribution with mean 1: its inverse CDF at the middle of each of 2^32 intervals."""
    return Distribution(dtype, lambda word, out: out.copy_(_middle(word).log_().neg_()))


def _middle(word: Tensor) -> Tensor:
    """Map each int32 word to the middle of one of the 2^32 equal intervals of [0, 1], in float64."""
    return word.double().add_(2**31 + 0.5).mul_(math.ldexp(1, -32))


def _mixed(state: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64, a permutation of 64-bit integers, in place, and return the result."""
    state = state.bitwise_xor_(_shifted(state, 30)).mul_(_FIRST)
    state = state.bitwise_xor_(_shifted(state, 27)).mul_(_SECOND)
    return state.bitwise_xor_(_shifted(state, 31))


def _shifted(state: Tensor, by: int) -> Tensor:
    """Return a shift to the right that fills with zeros; torch has signed integers only."""
    return (state >> by).bitwise_and_((1 << (64 - by)) - 1)


def _high(state: Tensor) -> Tensor:
    """Return the upper half of each 64-bit integer."""
    return (state >> 32).to(torch.int32)

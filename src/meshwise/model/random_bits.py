"""Hash a key and an element's index to random bits, so that a rank can draw any slice of a tensor.

torch's generators are sequences: an element's number depends on the draws before it, and so on the tensor's shape and
on the rank's slice. Here the bits of an element are a hash of a key and of the element's index in the full tensor. The
bits are the same in any slice and on any device.

    key, index along every dim but the last ──► 64 bits for each row:  a (32 bits), c (32 bits, odd)
    key, index along the last dim           ──► 32 bits for each column: b
    word = c · f((a xor b) · m),   f(x) = x xor x>>15            32-bit arithmetic, six passes over the tensor

Rows and columns are hashed by the finalizer of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, 2014). So the cheap last line starts from mixed bits, and rows hardly ever share a multiplier c. The hash is
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
_COLUMNS = 0x2545F4914F6CDD1D
_WORD = 0x2C1B3C6D


_BLOCK = 2**16
"""Number of words computed at a time on the CPU, so that they stay in the cache; a GPU computes all words at once."""


@dataclass(frozen=True)
class IndexBlock:
    """A slice of a full tensor: along dim d, the `shape[d]` elements from `starts[d]` on.

    `places`: for each dim, the indices in the full tensor if they are not neighbours, else None. Empty: all are."""

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

    @property
    def matrix(self) -> tuple[int, int]:
        """(product of all dims but the last, last dim)."""
        return math.prod(self.shape[:-1]), self.shape[-1]


@dataclass(frozen=True)
class Distribution:
    """Distribution of random values: `write(words, out)` fills `out` (of `dtype`) from uniform random int32 `words`."""

    dtype: torch.dtype
    write: Callable[[Tensor, Tensor], object]


def draw(part: IndexBlock, *, key: int, kind: Distribution, device: torch.device, into: Tensor | None = None) -> Tensor:
    """Return random values of `kind` for a slice, with two dims or more, of a full tensor.

    | key    any signed 64-bit integer; equal keys give equal draws
    | into   contiguous tensor of the kind's dtype to fill and return, with as many elements; None: a new tensor"""
    filled = torch.empty(part.shape, dtype=kind.dtype, device=device) if into is None else into
    _fill(filled.view(1, *part.matrix), part=part, keys=[key], kind=kind)
    return filled


def draw_many(part: IndexBlock, *, keys: Sequence[int], kind: Distribution, device: torch.device) -> Tensor:
    """Return the values that `draw` returns for each key, (keys, *shape of the part), by as few operations as one."""
    filled = torch.empty((len(keys), *part.shape), dtype=kind.dtype, device=device)
    _fill(filled.view(len(keys), *part.matrix), part=part, keys=keys, kind=kind)
    return filled


def shaped(drawn: Tensor, *, shape: Sequence[int], turned: bool) -> Tensor:
    """Return a drawn slice in the shape of its tensor; `turned`: its first two dims are swapped there."""
    return drawn.view(shape[1], shape[0], *shape[2:]).transpose(0, 1) if turned else drawn.view(shape)


def _fill(lines: Tensor, *, part: IndexBlock, keys: Sequence[int], kind: Distribution) -> None:
    """Fill `lines` (keys, rows, columns)."""
    rows, column = _hashed(part, keys, lines.device)
    first, factor = _high(rows).unsqueeze(-1), (_high(rows << 32) | 1).unsqueeze(-1)
    number, height, width = lines.shape
    together, step = number, max(1, height)
    if lines.device.type == "cpu":
        together, step = max(1, _BLOCK // max(1, height * width)), max(1, _BLOCK // max(1, width))
    for some in range(0, number, together):
        these = slice(some, some + together)
        for low in range(0, height, step):
            part_of = these, slice(low, low + step)
            word = first[part_of] ^ column[these]
            word *= _WORD
            word ^= word >> 15
            word *= factor[part_of]
            kind.write(word, lines[part_of])


def _hashed(part: IndexBlock, keys: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 64-bit hashes of the rows of a slice, (keys, rows), and 32-bit hashes of its columns, (keys, 1, columns).

    The index of an element enters times `_GOLDEN`."""
    key = torch.tensor(keys, dtype=torch.int64).to(device, non_blocking=True)
    ends = [part.indices(dim, device=device).mul_(_GOLDEN) for dim in range(len(part.shape))]
    column = _high(_mixed((key ^ _COLUMNS).unsqueeze(-1) + ends[-1]))
    rows = key
    for index in ends[:-1]:
        rows = _mixed(rows.unsqueeze(-1) + index)
    return rows.flatten(1), column.unsqueeze(1)


@lru_cache(maxsize=256)
def keep_mask(probability: float, *, dtype: torch.dtype = torch.bool) -> Distribution:
    """Return the distribution of a dropout mask: True (or 1) with `probability`, rounded to a multiple of 2^-32."""
    most = round(probability * 2**32) - 2**31 - 1
    if most < -(2**31):
        return Distribution(dtype, lambda _word, out: out.zero_())
    return Distribution(dtype, lambda word, out: torch.le(word, most, out=out))


def uniform(dtype: torch.dtype) -> Distribution:
    """Return the uniform distribution over [0, 1), on a grid of 2^-32 or of the dtype's precision if coarser."""
    bits = min(32, round(-math.log2(torch.finfo(dtype).eps)) + 1)
    return Distribution(
        dtype, lambda word, out: out.copy_(word >> (32 - bits)).add_(2 ** (bits - 1)).mul_(math.ldexp(1, -bits))
    )


def normal(dtype: torch.dtype) -> Distribution:
    """Return the standard normal distribution: its inverse at the middle of each of 2^32 intervals."""
    return Distribution(dtype, lambda word, out: out.copy_(_middle(word).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))))


def exponential(dtype: torch.dtype) -> Distribution:
    """Return the exponential distribution with mean 1: its inverse at the middle of each of 2^32 intervals."""
    return Distribution(dtype, lambda word, out: out.copy_(_middle(word).log_().neg_()))


def _middle(word: Tensor) -> Tensor:
    """Return the middle of each word's interval, of the 2^32 equal intervals of [0, 1]."""
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

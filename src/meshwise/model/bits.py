"""Random bits that are a function of a key and an index, so that a part of a tensor has the bits of that part.

torch's generators are sequences: an element's number depends on how many were drawn before it, and therefore on the
shape of the tensor and on which part of it a rank holds. Here the bits of an element are a hash of the key and of the
element's index in the whole tensor, computed where they are needed, in any slice, on any device, in the same way.

    key, index along every dim but the last ──► 64 bits for each row:  a (32 bits), c (32 bits, odd)
    key, index along the last dim           ──► 32 bits for each column: b
    word = c · f((a xor b) · m),   f(x) = x xor x>>15            32-bit arithmetic, six passes over the tensor

Rows and columns are hashed by the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, 2014), so the cheap last line starts from mixed bits, and no two rows share a multiplier. It is meant for
masks and noise, not for cryptography.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_FIRST = -4658895280553007687  # 0xBF58476D1CE4E5B9
_SECOND = -7723592293110705685  # 0x94D049BB133111EB
_COLUMNS = 0x2545F4914F6CDD1D
_WORD = 0x2C1B3C6D


_BLOCK = 2**16
"""Words computed at a time on the CPU, so that the passes over them stay in the cache; a GPU takes all at once."""


@dataclass(frozen=True)
class Part:
    """A part of a whole tensor, whose size is nowhere asked: along dim d, the elements from `starts[d]` on."""

    shape: tuple[int, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """What is drawn: elements of `dtype`, made by `convert` from uniform int32 words of the same shape."""

    dtype: torch.dtype
    convert: Callable[[Tensor], Tensor]


def draw(part: Part, *, key: int, kind: Kind, device: torch.device) -> Tensor:
    """The draw of a part (of one dim or more) under `key`, any signed 64-bit integer."""
    rows, column = _hashed(part, key, device)
    first, factor = _high(rows).unsqueeze(-1), (_high(rows << 32) | 1).unsqueeze(-1)
    drawn = torch.empty(rows.numel(), column.numel(), dtype=kind.dtype, device=device)
    step = drawn.size(0) if device.type != "cpu" else max(1, _BLOCK // max(1, column.numel()))
    for low in range(0, drawn.size(0), max(1, step)):
        word = first[low : low + step] ^ column
        word *= _WORD
        word ^= word >> 15
        word *= factor[low : low + step]
        drawn[low : low + step] = kind.convert(word)
    return drawn.view(part.shape)


def _hashed(part: Part, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """64 bits for each row of the part, in its order, and 32 for each column."""
    state = torch.tensor(key, dtype=torch.int64, device=device)
    columns = torch.arange(part.starts[-1], part.starts[-1] + part.shape[-1], device=device)
    column = _high(_mixed((columns + 1) * _GOLDEN + _mixed(state ^ _COLUMNS)))
    for size, start in zip(part.shape[:-1], part.starts[:-1], strict=True):
        index = torch.arange(start, start + size, device=device)
        state = _mixed(state.unsqueeze(-1) + (index + 1) * _GOLDEN)
    return _mixed(state).flatten(), column


def kept(probability: float) -> Kind:
    """Booleans that are True with `probability`, to within 2^-32."""
    most = round(probability * 2**32) - 2**31 - 1
    if most < -(2**31):
        return Kind(torch.bool, lambda word: torch.zeros_like(word, dtype=torch.bool))
    return Kind(torch.bool, lambda word: word <= most)


def uniform(word: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1), on a grid of 2^-32 or of the dtype's own precision where that is coarser."""
    bits = min(32, round(-torch.log2(torch.tensor(torch.finfo(dtype).eps, dtype=torch.float64)).item()) + 1)
    return (word >> (32 - bits)).to(dtype).add_(2 ** (bits - 1)).mul_(2.0**-bits)


def normal(word: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers: the inverse of their distribution at the middle of each of 2^32 intervals."""
    middle = word.double().add_(0.5).mul_(2.0**-31)  # in (-1, 1)
    return middle.erfinv_().mul_(math.sqrt(2)).to(dtype)


def exponential(word: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Exponentially distributed numbers above 0, with mean 1, in the same way."""
    return word.double().add_(2**31 + 0.5).mul_(2.0**-32).log_().neg_().to(dtype)


def _mixed(state: Tensor) -> Tensor:
    """The finaliser of splitmix64: a permutation of 64-bit integers that changes half of the bits for any one bit."""
    state = (state ^ _shifted(state, 30)) * _FIRST
    state = (state ^ _shifted(state, 27)) * _SECOND
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, by: int) -> Tensor:
    """A shift to the right that fills with zeros; torch has signed integers only."""
    return (state >> by) & ((1 << (64 - by)) - 1)


def _high(state: Tensor) -> Tensor:
    """The upper half of each 64-bit integer."""
    return (state >> 32).to(torch.int32)

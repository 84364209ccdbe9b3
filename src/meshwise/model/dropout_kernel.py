"""Compute dropout by a Triton kernel that computes each bit of the mask where it is used."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 1024
"""Elements of one program of the kernel."""


def drop(x: Tensor, *, numbers: Any, factor: int) -> Tensor:
    """Return `x`, on a GPU, times the scale of `numbers` (a `MaskNumbers`) where its mask keeps it, else 0.

    `factor`: the factor m of a word, see `random_bits`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.numel(), numbers.column.numel()
    _drop[((x.numel() + _ELEMENTS - 1) // _ELEMENTS,)](x, out, numbers, size, factor, _ELEMENTS)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _drop(x, out, numbers, size, FACTOR: tl.constexpr, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = place < size[0]
    row = place // size[1]
    word = tl.load(numbers.first + row, inside, 0) ^ tl.load(numbers.column + place % size[1], inside, 0)
    word *= FACTOR
    word = (word ^ (word >> 15)) * tl.load(numbers.factor + row, inside, 0)
    value = tl.load(x + place, inside, 0)
    scale = tl.load(numbers.scale)
    if value.dtype != tl.float64:
        scale = scale.to(tl.float32)
    kept = value.to(scale.dtype) * scale
    tl.store(out + place, tl.where(word <= numbers.most, kept, 0.0).to(value.dtype), inside)

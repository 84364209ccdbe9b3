"""Codecs of gradients on the wire: rows of floating-point numbers become rows of bytes, and approximate numbers again.

    | wire        bytes for n elements, in b = n / 256 blocks    a value becomes
    | 1bit        n / 8 + 4 b                                    its sign times the block's mean magnitude
    | int8, int4  n + 4 b, n / 2 + 4 b                           the nearest of 255 (15) even levels
    | qsgd:B      n B / 8 + 4 b                                  one of its two nearest levels, at random
    | fp8         n + 4 b                                        its nearest float8_e4m3
    | topk:F      k (element size + 4), k = max(1, F n)          itself if among the k largest of the row, else 0

A block of 256 elements has its own fp32 scale: its largest magnitude, or its mean magnitude for `1bit` (Tang et al.,
arXiv 2102.02888). `qsgd` rounds up with a probability that makes the expected value exact (Alistarh et al., arXiv
1610.02132). Its random numbers are hashed from value, place and scale, so they need no state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

BLOCK = 256
"""Elements that share a scale."""


class Codec(Protocol):
    """A way to write rows of numbers as rows of bytes. A value that is not finite is not finite after decoding."""

    def encode(self, values: Tensor) -> Tensor:
        """Return uint8 rows, (rows, bytes), for `values`, (rows, elements); elements are a multiple of 16."""

    def decode(self, packed: Tensor, *, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the values of encoded rows, (rows, elements)."""


@dataclass(frozen=True)
class LevelCodec:
    """Even levels of `bits` bits (1, 4 or 8), rounded to the nearest, or up and down at random."""

    bits: int
    random: bool = False

    def encode(self, values: Tensor) -> Tensor:
        """Return scales and codes as bytes, (rows, bytes)."""
        blocks, elements = _blocks(values), values.shape[-1]
        if self.bits == 1:
            counts = torch.full(blocks.shape[1:2], BLOCK, dtype=values.dtype, device=values.device)
            counts[-1] = elements - (blocks.shape[1] - 1) * BLOCK
            scales = (blocks.abs().sum(-1) / counts).float()
            codes = (blocks >= 0).to(torch.uint8)
        else:
            scales, top = blocks.abs().amax(-1).float(), self._top
            ratios = blocks / scales.clamp(min=_SMALLEST).unsqueeze(-1).to(values.dtype) * top
            shift = _hashed(blocks, scales) if self.random else 0.5
            codes = (ratios + shift).floor().clamp(-top, top).add(top).to(torch.uint8)
        codes = codes.flatten(1)[:, :elements].reshape(len(values), -1, 8 // self.bits)
        packed = (codes << self._shifts(codes)).sum(-1, dtype=torch.uint8)
        return torch.cat([scales.view(torch.uint8), packed], dim=1)

    def decode(self, packed: Tensor, *, elements: int, dtype: torch.dtype) -> Tensor:
        """Return codes times scales, (rows, elements)."""
        scales, body = _scales(packed, elements)
        codes = (body.unsqueeze(-1) >> self._shifts(body)) & (2**self.bits - 1)
        levels = codes.flatten(1).to(dtype)
        levels = levels * 2 - 1 if self.bits == 1 else (levels - self._top) / self._top
        found: Tensor = levels * scales.to(dtype).repeat_interleave(BLOCK, 1)[:, :elements]
        return found

    @property
    def _top(self) -> int:
        return (1 << self.bits - 1) - 1

    def _shifts(self, like: Tensor) -> Tensor:
        return torch.arange(0, 8, self.bits, dtype=torch.uint8, device=like.device)


@dataclass(frozen=True)
class Float8Codec:
    """float8_e4m3 with a scale for each block."""

    def encode(self, values: Tensor) -> Tensor:
        """Return scales and values as bytes, (rows, bytes)."""
        blocks = _blocks(values)
        scales = blocks.abs().amax(-1).float() / torch.finfo(torch.float8_e4m3fn).max
        scaled = blocks / scales.clamp(min=_SMALLEST).unsqueeze(-1).to(values.dtype)
        body = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)[:, : values.shape[-1]]
        return torch.cat([scales.view(torch.uint8), body], dim=1)

    def decode(self, packed: Tensor, *, elements: int, dtype: torch.dtype) -> Tensor:
        """Return values times scales, (rows, elements)."""
        scales, body = _scales(packed, elements)
        values = body.contiguous().view(torch.float8_e4m3fn).to(dtype)
        return values * scales.to(dtype).repeat_interleave(BLOCK, 1)[:, :elements]


@dataclass(frozen=True)
class TopCodec:
    """The largest elements of a row by magnitude, a `fraction` of them, with their indices."""

    fraction: float

    def encode(self, values: Tensor) -> Tensor:
        """Return the values and int32 indices as bytes, (rows, bytes)."""
        kept = max(1, round(self.fraction * values.shape[-1]))
        index = values.abs().topk(kept, dim=-1, sorted=False).indices
        found = values.gather(-1, index)
        return torch.cat([found.view(torch.uint8), index.int().view(torch.uint8)], dim=1)

    def decode(self, packed: Tensor, *, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the sent values at their places and 0 elsewhere, (rows, elements)."""
        middle = packed.shape[1] // (dtype.itemsize + 4) * dtype.itemsize
        found, index = packed[:, :middle].reshape(-1).view(dtype), packed[:, middle:].reshape(-1).view(torch.int32)
        values = torch.zeros(len(packed), elements, dtype=dtype, device=packed.device)
        return values.scatter_(-1, index.long().view(len(packed), -1), found.view(len(packed), -1))


CODECS: Mapping[str, Callable[[float], Codec]] = {
    "int8": lambda _: LevelCodec(8),
    "int4": lambda _: LevelCodec(4),
    "fp8": lambda _: Float8Codec(),
    "1bit": lambda _: LevelCodec(1),
    "qsgd": lambda bits: LevelCodec(int(bits), random=True),
    "topk": TopCodec,
}
"""Codec for each name in the key `wire`, from its number."""

_SMALLEST = 1e-30
"""Least divisor of a block, so that a block of zeros stays zero."""


def _blocks(values: Tensor) -> Tensor:
    """Return rows as blocks, (rows, blocks, BLOCK), the last one filled up with zeros."""
    blocks: Tensor = nn.functional.pad(values, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    return blocks


def _scales(packed: Tensor, elements: int) -> tuple[Tensor, Tensor]:
    """Return the scales, (rows, blocks), and the remaining bytes of encoded rows."""
    size = -(-elements // BLOCK) * 4
    return packed[:, :size].reshape(-1).view(torch.float32).view(len(packed), -1), packed[:, size:]


def _hashed(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return a number in [0, 1) for each element, hashed from its bits, its place in the block, and the scale."""
    place = torch.arange(BLOCK, device=blocks.device) * 0x85EBCA6B
    mixed = blocks.float().view(torch.int32).long() * 0x9E3779B1 + place
    mixed = mixed + scales.view(torch.int32).long().unsqueeze(-1) * 0xC2B2AE35
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    found: Tensor = ((mixed >> 15) & 0xFFFFFF).to(blocks.dtype) / 2**24
    return found

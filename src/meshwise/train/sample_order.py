"""Compute the shuffled order in which a run reads its samples, as a pure function of seed and global number.

A run counts its samples, and the count is a sample's global number. The global batch of step s has the global numbers
s·B … (s+1)·B − 1, under every plan:

    | number   0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 …         B = 6, seven samples
    | sample   3 0 6 1 5 2   4|2 5 0 3  6    1 4|…         a new permutation every seven numbers

So every plan trains on the same global batches, and every batch is full: an epoch's last batch also has samples of the
next epoch. A checkpoint stores only the count.

The permutation of an epoch is a keyed Feistel network on two digits in base ⌈√size⌉. It is applied again until the
result is below `size` (Black and Rogaway, *Ciphers with Arbitrary Finite Domains*, 2002). Its round function is the
finaliser of SplitMix64 (Steele, Lea and Flood, 2014). Memory and time per sample do not depend on `size`."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

UInt64Array = NDArray[np.uint64]
"""Array of unsigned 64-bit integers."""


@dataclass(frozen=True)
class SampleOrder:
    """The order in which a run reads a dataset of `size` samples; `seed` shuffles it anew in every epoch."""

    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"SampleOrder of {self.size} samples: give at least 1")

    def indices(self, start: int, *, stop: int) -> list[int]:
        """Return the index in the dataset (0 … size-1) of each sample with a global number from `start` to `stop`-1."""
        numbers = np.arange(start, stop, dtype=np.uint64)
        size = np.uint64(self.size)
        epoch = numbers // size
        key = _mix(_mix(np.full_like(epoch, self.seed & _MASK)) ^ epoch)
        return [int(index) for index in _permute(numbers % size, self.size, key)]


def _permute(index: UInt64Array, size: int, key: UInt64Array) -> UInt64Array:
    """Apply to each index (0 … size-1) the permutation that its `key` selects; both arrays have one length."""
    base = np.uint64(math.isqrt(size - 1) + 1)
    result = index
    outside = np.ones(index.shape, dtype=np.bool_)
    while outside.any():
        left, right = result // base, result % base
        for number in range(_ROUNDS):
            left, right = right, (left + _mix(right ^ _mix(key + np.uint64(number)))) % base
        result = np.where(outside, left * base + right, result)
        outside = result >= np.uint64(size)
    return result


def _mix(x: UInt64Array) -> UInt64Array:
    """Return a hash of 64-bit integers: a bijection in which each input bit changes about half of the output bits."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

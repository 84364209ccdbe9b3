"""Compute the relative difference of two tensors, as `agree` and `verify` define it.

    relative difference of a and b  =  max |a − b|  /  max(max |b|, floor)

b is the trusted side. The full tensor has one scale. An element that is small by cancellation has the rounding error of
its large terms, and an element-wise ratio would report this error as a difference.

The floor is for tensors in which every element is small. An example is the bias of an attention's keys: softmax does
not depend on it, so its gradient is zero. The computed gradient is only rounding, under any plan: about 1e-18 where
other gradients are 1e-2. A family of tensors, such as all gradients, gives the scale below which a tensor is rounding:

    floor  =  max |b| of the family  ·  128 eps / bound

In float64 with the bound 1e-9 the floor is 3e-5 of the family's largest element."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ROUNDINGS = 128


@dataclass(frozen=True)
class Difference:
    """Largest difference of two tensors, relative as above, its index in the tensor, and both values there."""

    relative: float = 0.0
    index: tuple[int, ...] = ()
    value: float = 0.0
    expected: float = 0.0

    def __str__(self) -> str:
        where = f" at {list(self.index)}" if self.index else ""
        return f"{self.relative:.1e}{where}: {self.value:.17g} and {self.expected:.17g}"


def difference(value: Tensor, expected: Tensor, *, floor: float = 0.0) -> Difference:
    """Return the relative difference of two tensors of the same shape, computed in float64.

    The difference is infinite for a NaN on either side, and for an infinity on one side only. If `expected` and `floor`
    are zero, it is infinite for a value other than zero. Raises ValueError when the shapes differ."""
    if value.shape != expected.shape:
        raise ValueError(f"shape {tuple(value.shape)} cannot be compared with {tuple(expected.shape)}")
    if not expected.numel():
        return Difference()
    theirs = expected.detach().double().reshape(-1)
    ours = value.detach().to(theirs.device).double().reshape(-1)
    furthest, at = (ours - theirs).abs_().max(dim=0)
    if not furthest.isfinite():
        apart = torch.where(ours == theirs, torch.zeros_like(theirs), (ours - theirs).abs())
        furthest, at = apart.nan_to_num_(nan=math.inf, posinf=math.inf).max(dim=0)
    largest, scale = float(furthest), max(largest_magnitude(theirs), floor)
    relative = 0.0 if largest == 0 else largest / scale if 0 < scale < math.inf else math.inf
    index = tuple(map(int, np.unravel_index(int(at), tuple(expected.shape))))
    return Difference(relative, index, float(ours[at]), float(theirs[at]))


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor: 0 when it is empty, infinity when it holds a NaN."""
    if not tensor.numel():
        return 0.0
    largest = float(tensor.detach().abs().max())
    return math.inf if math.isnan(largest) else largest


def rounding_floor(largest: float, *, bound: float, dtype: torch.dtype) -> float:
    """Return the scale below which a tensor is only rounding, in a family whose largest absolute value is `largest`."""
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return largest * min(1.0, _ROUNDINGS * eps / bound) if bound > 0 and largest < math.inf else 0.0

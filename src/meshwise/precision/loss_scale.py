"""Adapt the loss scale of fp16 so that gradients neither underflow nor overflow.

The loss is multiplied by a scale, and the gradient is divided by it in fp32 (Micikevicius et al., arXiv 1710.03740,
section 3.2). If the gradient overflows, every rank skips the update, and the scale is lowered. The first overflow
divides it by 2, the second in a row by 4, the third by 8. After `patience` applied updates it doubles.

The trainer sums the loss over the batch, and divides by the exact count of loss terms at the end of the step. So the
sum is multiplied by `factor`: the scale over an approximate count. docs/precision.md says how the count is chosen."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwise.base.tensor_tree import tensors


@dataclass(frozen=True)
class LossScale:
    """Loss scale between two steps. A change returns a new object.

    | value      factor of the mean loss, a power of two; raises ValueError for other numbers
    | updates    updates that were applied since the scale last changed
    | overflows  overflows in a row, up to the last step
    | patience   updates until the scale doubles
    | count      approximate number of loss terms in a batch, a power of two; 0 before the first step"""

    value: float = 2.0**13
    updates: int = 0
    overflows: int = 0
    patience: int = 2000
    count: float = 0.0

    LEAST = 2.0**-14
    """Smallest scale; a gradient that is still not finite is taken as infinite or NaN at every scale."""
    MOST = 2.0**24
    """Scale that is not doubled any more."""

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf or math.frexp(self.value)[0] != 0.5:
            raise ValueError(f"a loss scale of {self.value:g}; give a power of two, as 1024.0: it rounds no gradient")

    @property
    def factor(self) -> float:
        """Factor of the summed loss: the scale over the approximate count."""
        return self.value / (self.count or 1.0)

    def expecting(self, count: float) -> "LossScale":
        """Return the scale with `count`, rounded to a power of two; unchanged if `count` is 0 or not finite."""
        return replace(self, count=2.0 ** round(math.log2(count))) if 0 < count < math.inf else self

    @property
    def exhausted(self) -> bool:
        """True if another overflow would lower the scale below `LEAST`."""
        return self.overflowed().value < self.LEAST

    def overflowed(self) -> "LossScale":
        """Return the lowered scale, after a step whose gradient was not finite."""
        return replace(self, value=self.value / 2 ** (self.overflows + 1), updates=0, overflows=self.overflows + 1)

    def updated(self) -> "LossScale":
        """Return the scale after a step that was applied: doubled after `patience` such steps, up to `MOST`."""
        if self.updates + 1 < self.patience or self.value >= self.MOST:
            return replace(self, updates=self.updates + 1, overflows=0)
        return replace(self, value=self.value * 2, updates=0, overflows=0)

    def state(self) -> dict[str, float]:
        """Return the fields by name for a checkpoint, as JSON values."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, float] | None) -> "LossScale":
        """Return the scale that `state()` described, or a new scale if `state` is None."""
        return cls() if state is None else cls(**state)  # type: ignore[arg-type] # as `state` has made them


def likely_count(batch: Any) -> int:
    """Return the size of a batch's smallest tensor (scalars aside), usually its labels; 0 without such a tensor."""
    return min((tensor.numel() for tensor in tensors(batch) if tensor.dim()), default=0)

"""The loss scale of fp16: as large as it can be without the gradient overflowing.

fp16 holds nothing below 6e-8, and gradients are often smaller. Multiplied by the scale in the loss and divided by it
again in fp32, they survive (Micikevicius et al., arXiv 1710.03740, section 3.2). How large the scale may be only shows
when a gradient overflows: then the update is left out, on every rank, and the scale goes down.

    | step       1       2       3       4 … 2003    2004 …
    | scale      8192    4096    1024    128         256
    | gradient   inf     inf     inf     finite      finite

An overflow halves the scale, the second in a row quarters it, the third divides it by 8; it doubles again after
`patience` updates. It begins where the gradient of a mean loss seldom overflows: a step that is lost costs more than
bits that are won.

The loss here is a sum over the whole batch, and would overflow at a scale that is right for its mean. The mean is not
known before the last forward, and the division by the true count comes once, at the end. So the sum is multiplied by
`factor`, the scale over an approximate count: the count of the step before. Before the first step it is the number of
elements of the smallest tensor of a batch, usually the labels. Both are powers of two, so neither rounds anything, and
the gradient is divided by the same factor. The approximate count changes no number that is not lost or infinite.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwise.base.tensor_tree import tensors


@dataclass(frozen=True)
class LossScale:
    """A loss scale between two steps.

    | value      factor of the mean loss
    | updates    since the scale last changed
    | overflows  in a row, up to now
    | count      approximate count of a batch, a power of two; 0 before the first
    """

    value: float = 2.0**13
    updates: int = 0
    overflows: int = 0
    patience: int = 2000
    count: float = 0.0

    LEAST = 2.0**-14
    """A gradient that overflows below this scale is not finite at any scale."""
    MOST = 2.0**24

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf or math.frexp(self.value)[0] != 0.5:
            raise ValueError(f"a loss scale of {self.value:g}; give a power of two, as 1024.0: it rounds no gradient")

    @property
    def factor(self) -> float:
        """Factor that multiplies the sum of the losses."""
        return self.value / (self.count or 1.0)

    def expecting(self, count: float) -> "LossScale":
        """Return the scale for batches of about this `count`; unchanged if `count` is 0 or not finite."""
        return replace(self, count=2.0 ** round(math.log2(count))) if 0 < count < math.inf else self

    @property
    def exhausted(self) -> bool:
        """True if a smaller scale cannot help."""
        return self.overflowed().value < self.LEAST

    def overflowed(self) -> "LossScale":
        """Return the scale after a step whose gradient was not finite."""
        return replace(self, value=self.value / 2 ** (self.overflows + 1), updates=0, overflows=self.overflows + 1)

    def updated(self) -> "LossScale":
        """Return the scale after a step that was applied."""
        if self.updates + 1 < self.patience or self.value >= self.MOST:
            return replace(self, updates=self.updates + 1, overflows=0)
        return replace(self, value=self.value * 2, updates=0, overflows=0)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, as JSON values."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, float] | None) -> "LossScale":
        """Return the scale of a checkpoint, or a new one if it has none."""
        return cls() if state is None else cls(**state)  # type: ignore[arg-type] # as `state` has made them


def likely_count(batch: Any) -> int:
    """Return the number of elements of the smallest tensor of a batch, usually its labels."""
    return min((tensor.numel() for tensor in tensors(batch) if tensor.dim()), default=0)

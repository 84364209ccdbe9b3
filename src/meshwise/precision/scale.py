"""The loss scale of fp16: as large as it can be without the gradient overflowing.

fp16 holds nothing below 6e-8, and gradients are often smaller; multiplied by the scale in the loss and divided by it
again in fp32, they survive (Micikevicius et al., arXiv 1710.03740, section 3.2). How large the scale may be only shows
when a gradient overflows: then the update is left out, on every rank, and the scale goes down.

    step       1       2       3      4 … 2003    2004 …
    scale      65536   32768   8192   1024        2048
    gradient   inf     inf     inf    finite      finite

An overflow halves the scale, the second in a row quarters it, the third divides it by 8: the loss here is a sum over
the whole batch and not a mean, so a first scale may be far off, and is found in a few steps. It doubles again after
`patience` updates. The scale is a power of two, so that scaling rounds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Scale:
    """A loss scale between two steps.

    value      what the loss is multiplied by
    updates    since the scale last changed
    overflows  in a row, up to now
    """

    value: float = 2.0**16
    updates: int = 0
    overflows: int = 0
    patience: int = 2000

    LEAST = 2.0**-14
    """An overflow below it is not the scale's fault: some gradient is not finite whatever it is multiplied by."""

    MOST = 2.0**24

    @property
    def exhausted(self) -> bool:
        """Whether a smaller scale cannot help."""
        return self.overflowed().value < self.LEAST

    def overflowed(self) -> Scale:
        """After a step whose gradient was not finite."""
        return replace(self, value=self.value / 2 ** (self.overflows + 1), updates=0, overflows=self.overflows + 1)

    def updated(self) -> Scale:
        """After a step that was applied."""
        if self.updates + 1 < self.patience or self.value >= self.MOST:
            return replace(self, updates=self.updates + 1, overflows=0)
        return replace(self, value=self.value * 2, updates=0, overflows=0)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, as JSON."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, float] | None) -> Scale:
        """The scale that a checkpoint kept; a first one where it kept none."""
        if state is None:
            return cls()
        return cls(float(state["value"]), *(int(state[key]) for key in ("updates", "overflows", "patience")))

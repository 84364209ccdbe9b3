"""A step from its begin to its end: what each rank is at, and how much memory it holds, moment by moment.

The pipeline's clock tells when the actions of a schedule begin and end. Here come what lies within them, what is before
and after the schedule, and the memory of the tape at its time:

    │ begin │ 0F0 │ 0F1 │      │   0B0   │   0B1   │ exchange │ update │
              ▔▔     ▔▔           ▔  ▔      ▔  ▔                ▔▔▔▔▔     what it waits for within
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from meshwise.pipeline.action import COMPUTE, RECEIVES, Action
from meshwise.simulate.clock import Prediction
from meshwise.simulate.moments import Moment, moments
from meshwise.simulate.price import Prices
from meshwise.simulate.tape import Call, Category, Memory, Segment, Wait
from meshwise.timeline import Event, Stream, Timeline

_MOST_EVENTS = 40_000
"""Of a timeline that shows every wait. Where there would be more, those of an action for the same axes are one, at its
end, and collectives are not shown."""


@dataclass(frozen=True)
class Level:
    """The memory of a rank at one moment."""

    seconds: float
    during: str
    """What the rank is at, as its tape says."""

    device: Mapping[Category, int]
    """Bytes where it computes."""

    @property
    def bytes(self) -> int:
        """In all."""
        return sum(self.device.values())


@dataclass(frozen=True)
class History:
    """The memory of one rank along pp over a step, and of all that are like it."""

    index: int
    seconds: float
    """Of the step."""

    levels: tuple[Level, ...]
    """One for every part of the step, all parts as long: when there was most."""

    @property
    def peak(self) -> Level:
        """When there is most."""
        return max(self.levels, key=lambda level: level.bytes)


@dataclass(frozen=True)
class _Act:
    """A segment and when it is played."""

    label: str
    start: float
    stop: float
    moments: Sequence[Moment]
    zero: float
    """The moment of `moments` that is its start."""

    def at(self, moment: float) -> float:
        """When a moment of its own is: the clock may give an action another time than the one it takes alone."""
        own = self.moments[-1].stop - self.zero if self.moments else 0.0
        return self.start + (moment - self.zero) * min(1.0, (self.stop - self.start) / own if own else 1.0)


class Replay:
    """A prediction, taken through its step."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self._prices = Prices(prediction.cluster)

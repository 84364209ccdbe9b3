"""When a rank began what, and how long it waited within it: noted while it runs, read when it is over.

A note is one reading of a clock: of the host's, or on a CUDA device of the device's, by an event on the current stream.
So what is measured is when the device did it, and nothing waits for anything before `read`.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias

import torch

from meshwise.comm.api.streams import StreamEvent, streams_of


class StepPhase(StrEnum):
    """What a rank is at in a step beside the actions of its schedule."""

    OUTSIDE = ""
    """No step runs."""
    BEGIN = "begin"
    SETTLE = "settle"
    EXCHANGE = "exchange"
    UPDATE = "update"


Activity: TypeAlias = Hashable
"""A `StepPhase`, or an action of a pipeline's schedule; it prints as one word."""


@dataclass(frozen=True)
class TimedSpan:
    """Time span of an activity (as `FlightRecorder.doing`), or of a wait or a move with its name.

    `beside`: it went on beside what the rank was at, on other threads.
    """

    what: Activity
    start: float
    stop: float
    waits: bool = False
    beside: bool = False


class ActivityStopwatch:
    """The notes of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._origin = self._streams.origin()
        self._marks: list[tuple[Activity, StreamEvent]] = []
        self._waits: list[tuple[str, StreamEvent, StreamEvent]] = []
        self._beside: list[TimedSpan] = []

    def now(self) -> StreamEvent:
        """Return an event at the current place of the current stream."""
        return self._streams.mark(timing=True)

    def begins(self, what: Activity) -> None:
        """End the current activity and begin `what`; the one outside of a step is none."""
        self._marks.append((what, self.now()))

    def waited(self, what: str, *, since: StreamEvent) -> None:
        """Note a wait for `what` that began at `since` and ends now."""
        self._waits.append((what, since, self.now()))

    def went_on(self, what: str, *, start: float, stop: float) -> None:
        """Something went on beside what the rank was at, by the host's clock."""
        self._beside.append(TimedSpan(what, start, stop, beside=True))

    def read(self, *, offset: float = 0.0) -> list[TimedSpan]:
        """Return this rank's activities in order, then its waits; `offset` is how far its clock is ahead, in
        seconds.
        """
        marks = [(what, self._origin.at(moment) - offset) for what, moment in self._marks]
        spans = [
            TimedSpan(what, start, stop) for (what, start), (_, stop) in pairwise(marks) if what != StepPhase.OUTSIDE
        ]
        for what, since, until in self._waits:
            start, stop = (self._origin.at(moment) - offset for moment in (since, until))
            spans.append(TimedSpan(what, start, stop, waits=True))
        beside = (replace(one, start=one.start - offset, stop=one.stop - offset) for one in self._beside)
        return [*spans, *beside]

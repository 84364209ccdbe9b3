"""Note when a rank begins each activity of a step, and how long it waits; read the notes afterwards.

A note is one reading of a clock: the host's, or on CUDA the device's, by an event on the current stream. So the times
are the device's own, and nothing waits before `read`.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias

import torch

from meshwise.comm.api.streams import StreamEvent, streams_of


class StepPhase(StrEnum):
    """Phase of a step outside the actions of the pipeline's schedule."""

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

    in_background: other threads of the rank did it meanwhile.
    """

    what: Activity
    start: float
    stop: float
    waits: bool = False
    in_background: bool = False


class ActivityStopwatch:
    """The notes of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._origin = self._streams.origin()
        self._marks: list[tuple[Activity, StreamEvent]] = []
        self._waits: list[tuple[str, StreamEvent, StreamEvent]] = []
        self._background: list[TimedSpan] = []

    def now(self) -> StreamEvent:
        """Return an event at the current place of the current stream."""
        return self._streams.mark(timing=True)

    def begins(self, what: Activity) -> None:
        """End the current activity and begin `what`, which may be `StepPhase.OUTSIDE`."""
        self._marks.append((what, self.now()))

    def waited(self, what: str, *, since: StreamEvent) -> None:
        """Note a wait for `what` that began at `since` and ends now."""
        self._waits.append((what, since, self.now()))

    def add_background(self, what: str, *, start: float, stop: float) -> None:
        """Note an activity of another thread of this rank, by the host's clock."""
        self._background.append(TimedSpan(what, start, stop, in_background=True))

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
        background = (replace(one, start=one.start - offset, stop=one.stop - offset) for one in self._background)
        return [*spans, *background]

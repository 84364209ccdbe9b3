"""When a rank began what, and how long it waited within it: noted while it runs, read when it is over.

A note is one reading of a clock: of the host's, or on a CUDA device of the device's, by an event on the current stream.
So what is measured is when the device did it, and nothing waits for anything before `read`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class TimedSpan:
    """Time span of an activity (as `FlightRecorder.doing`) or of a wait.

    `beside`: it went on beside what the rank was at, on other threads.
    """

    what: str
    start: float
    stop: float
    waits: bool = False
    beside: bool = False


class RankClock(Protocol):
    """Clock of a rank's device."""

    def now(self) -> Any:
        """Return the current time of the clock."""

    def seconds(self, moment: Any) -> float:
        """Return a moment as `time.monotonic` would tell it."""


class HostClock:
    """The host's own."""

    def now(self) -> float:
        """Return the current time in seconds."""
        return time.monotonic()

    def seconds(self, moment: float) -> float:
        """Return the moment itself."""
        return moment


class DeviceClock:
    """The clock of a CUDA device."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._zero, self._first = time.monotonic(), self.now()

    def now(self) -> torch.cuda.Event:
        """Return an event at the current place of the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: torch.cuda.Event) -> float:
        """Return the moment as `time.monotonic` would tell it; waits until it is there."""
        moment.synchronize()
        return self._zero + float(self._first.elapsed_time(moment)) / 1e3


class ActivityStopwatch:
    """The notes of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._clock: RankClock = DeviceClock() if device.type == "cuda" else HostClock()
        self._marks: list[tuple[str, Any]] = []
        self._waits: list[tuple[str, Any, Any]] = []
        self._beside: list[TimedSpan] = []

    def now(self) -> Any:
        """Return the current time of the clock."""
        return self._clock.now()

    def begins(self, what: str) -> None:
        """End the current activity and begin `what`; "" begins none."""
        self._marks.append((what, self._clock.now()))

    def waited(self, what: str, *, since: Any) -> None:
        """Note a wait for `what` that began at `since` and ends now."""
        self._waits.append((what, since, self._clock.now()))

    def went_on(self, what: str, *, start: float, stop: float) -> None:
        """Something went on beside what the rank was at, by the host's clock."""
        self._beside.append(TimedSpan(what, start, stop, beside=True))

    def read(self, *, offset: float = 0.0) -> list[TimedSpan]:
        """Return this rank's activities in order, then its waits; `offset` is how far its clock is ahead, in
        seconds.
        """
        marks = [(what, self._clock.seconds(moment) - offset) for what, moment in self._marks]
        spans = [TimedSpan(what, start, stop) for (what, start), (_, stop) in pairwise(marks) if what]
        for what, since, until in self._waits:
            start, stop = (self._clock.seconds(moment) - offset for moment in (since, until))
            spans.append(TimedSpan(what, start, stop, waits=True))
        beside = (replace(one, start=one.start - offset, stop=one.stop - offset) for one in self._beside)
        return [*spans, *beside]

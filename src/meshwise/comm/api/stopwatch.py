"""Measure when a rank begins each activity of a step, and how long it waits in collectives; or show it to a profiler.

Each time is taken by an event on the current CUDA stream, or on the CPU by the clock. So on a GPU the times are GPU
times, and the host does not wait for the GPU before `read`."""

import contextlib
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, TypeAlias

from torch.profiler import record_function

from meshwise.comm.api.streams import StreamEvent, Streams


class StepPhase(StrEnum):
    """Phase of a step before or after the actions of the pipeline's schedule."""

    OUTSIDE = ""
    """No step runs."""
    BEGIN = "begin"
    """Before the first action: the batch is cut into micro-batches."""
    SETTLE = "settle"
    """After the last action: gradients of tied parameters are summed, and gradient reductions are completed."""
    EXCHANGE = "exchange"
    """The ranks add up losses, counts and norms."""
    UPDATE = "update"
    """The optimizer updates the parameters."""


Activity: TypeAlias = Hashable
"""A `StepPhase`, or an action of a pipeline's schedule; `str` of it is one word."""


@dataclass(frozen=True)
class TimedSpan:
    """Time span of an activity, of a wait in a collective, or of work of another thread; times in seconds."""

    what: Activity
    """Activity (`FlightRecorder.doing`), or the name of the collective (`all_reduce dp`) or of the other work."""
    start: float
    stop: float
    waits: bool = False
    """True for a wait in a collective."""
    in_background: bool = False
    """True for work of another thread of the rank, at the same time as the activities."""


class ProfilerRanges:
    """Ranges of torch's profiler around the activities and waits of one rank, by which a trace is read.

    Inside `torch.autograd.profiler.emit_nvtx()` they are NVTX ranges, for Nsight Systems."""

    def __init__(self) -> None:
        self._activity = contextlib.ExitStack()

    def begins(self, what: Activity) -> None:
        """End the range of the current activity and begin the range of `what`; none for `StepPhase.OUTSIDE`."""
        self._activity.close()
        if what != StepPhase.OUTSIDE:
            self._activity.enter_context(record_function(str(what)))

    def waiting(self, what: str) -> AbstractContextManager[Any]:
        """Return the range of a wait for the collective `what`."""
        return record_function(f"wait {what}")


class ActivityStopwatch:
    """Stopwatch for the activities and waits of one rank."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._origin = self._streams.origin()
        self._marks: list[tuple[Activity, StreamEvent]] = []
        self._waits: list[tuple[str, StreamEvent, StreamEvent]] = []
        self._background: list[TimedSpan] = []

    def now(self) -> StreamEvent:
        """Return an event with a time, recorded on the current stream."""
        return self._streams.mark(timing=True)

    def begins(self, what: Activity) -> None:
        """End the current activity and begin `what`, which may be `StepPhase.OUTSIDE`."""
        self._marks.append((what, self.now()))

    def waited(self, what: str, *, since: StreamEvent) -> None:
        """Add a wait for the collective `what` that began at the event `since` and ends now."""
        self._waits.append((what, since, self.now()))

    def add_background(self, what: str, *, start: float, stop: float) -> None:
        """Add work of another thread of this rank, with times of `time.monotonic`."""
        self._background.append(TimedSpan(what, start, stop, in_background=True))

    def read(self, *, offset: float = 0.0) -> list[TimedSpan]:
        """Return this rank's activities in order, then its waits, then the work of its other threads. Blocks the host
        until the GPU has reached the last event. offset: seconds to subtract from all times."""
        marks = [(what, self._origin.at(moment) - offset) for what, moment in self._marks]
        spans = [
            TimedSpan(what, start, stop) for (what, start), (_, stop) in pairwise(marks) if what != StepPhase.OUTSIDE
        ]
        for what, since, until in self._waits:
            start, stop = (self._origin.at(moment) - offset for moment in (since, until))
            spans.append(TimedSpan(what, start, stop, waits=True))
        background = (replace(one, start=one.start - offset, stop=one.stop - offset) for one in self._background)
        return [*spans, *background]

"""Timelines of one step: the events of each rank with their times, predicted by a simulation or recorded in a run."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

EDGE_KINDS = frozenset({"begin", "exchange", "settle"})
"""Kinds of events outside of a rank's schedule: `begin` before it, the other kinds between it and the update."""


class TimelineRow(StrEnum):
    """Rows in which the events of one rank are drawn. Sends, collectives and moves may overlap the other rows."""

    COMPUTE = "computes"
    WAIT = "waits"
    LINK = "sends"
    COLLECTIVE = "collectives"
    TIERS = "moves between tiers"


@dataclass(frozen=True)
class Event:
    """An activity of one rank, with its start and end in seconds or another unit. Prints like an action: `2F0`."""

    rank: int
    row: TimelineRow
    kind: str
    """An action's kind (`F`, `SEND_F`), a collective with its axes (`all_reduce dp`), or a word (`update`)."""
    start: float
    stop: float
    stage: int | None = None
    microbatch: int | None = None

    @property
    def seconds(self) -> float:
        """Duration of the event."""
        return self.stop - self.start

    @property
    def is_background(self) -> bool:
        """True if the rank may compute or wait at the same time."""
        return self.row not in (TimelineRow.COMPUTE, TimelineRow.WAIT) and self.kind not in EDGE_KINDS | {"update"}

    @property
    def exposed(self) -> bool:
        """True if the event is a wait for a collective. A wait for a message belongs to the pipeline bubble instead."""
        return self.row is TimelineRow.WAIT and self.stage is None and not self.kind.startswith(("send", "recv"))

    def __str__(self) -> str:
        stage, microbatch = ("" if number is None else number for number in (self.stage, self.microbatch))
        return f"{stage}{self.kind}{microbatch}"


@dataclass(frozen=True)
class Timeline:
    """The events of one step, starting at time 0; the events of each row of a rank are in order."""

    events: tuple[Event, ...]
    pipelines: tuple[tuple[int, ...], ...]
    """The ranks of each pipeline, in the order of the rows of its schedule."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.pipelines))

    @cached_property
    def seconds(self) -> float:
        """Time from 0 to the end of the last event, in the unit of the events."""
        return max(event.stop for event in self.events)

    @cached_property
    def computing(self) -> tuple[tuple[Event, ...], ...]:
        """Computations of each rank, in order."""
        return self._of(TimelineRow.COMPUTE)

    @cached_property
    def waiting(self) -> tuple[tuple[Event, ...], ...]:
        """Waits of each rank, in order."""
        return self._of(TimelineRow.WAIT)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each rank, ascending."""
        return tuple(tuple(sorted({event.stage for event in row if event.stage is not None})) for row in self.computing)

    @cached_property
    def one_stage_each(self) -> bool:
        """True if every rank has exactly one stage."""
        return all(len(stages) == 1 for stages in self.stages)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Computing time of each rank, without the waits inside its computations."""
        pairs = zip(self.computing, self.waiting, strict=True)
        return tuple(sum(one.seconds for one in row) - time_within(row, inner=waits) for row, waits in pairs)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Fraction of the step in which each rank does not compute."""
        return tuple(1 - busy / self.seconds for busy in self.busy)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time of each rank without computation, from the start of its first computation to the end of its last.

        The largest value is the pipeline bubble as papers define it. `bubbles` also counts the time before and after
        these computations: the rank is idle then too, because the optimizer step waits for all ranks."""
        spans = (row[-1].stop - row[0].start for row in self.computing)
        return tuple(span - busy for span, busy in zip(spans, self.busy, strict=True))

    @cached_property
    def spent(self) -> Mapping[str, float]:
        """Time of a step by activity (see `time_by_activity`), mean over the ranks, in the unit of the events."""
        times = time_by_activity(self)
        every = dict.fromkeys(what for own in times for what in own)
        return {what: sum(own.get(what, 0.0) for own in times) / self.ranks for what in every}

    def _of(self, wanted: TimelineRow) -> tuple[tuple[Event, ...], ...]:
        rows: list[list[Event]] = [[] for _ in range(self.ranks)]
        for event in self.events:
            if event.row is wanted:
                rows[event.rank].append(event)
        return tuple(map(tuple, rows))


def time_within(outer: tuple[Event, ...], *, inner: tuple[Event, ...]) -> float:
    """Return the total time of the inner events that lie within one outer event. Outer events: sorted and disjoint."""
    starts = [event.start for event in outer]
    total = 0.0
    for event in inner:
        place = bisect_right(starts, event.start) - 1
        if place >= 0 and event.stop <= outer[place].stop:
            total += event.seconds
    return total


def time_by_activity(timeline: Timeline) -> tuple[dict[str, float], ...]:
    """Return the time of each rank by activity, in the timeline's unit. The values of a rank add up to the step.

    | computes         computations
    | update           the update of the parameters
    | waits for dp, …  waits for collectives along these axes
    | around           the time before the schedule, and between the schedule and the update
    | bubble           the remaining time, with nothing to compute"""
    changes: list[list[tuple[float, int, str]]] = [[] for _ in range(timeline.ranks)]
    for event in timeline.events:
        if event.stop > event.start and (activity := _activity(event)) is not None:
            changes[event.rank] += ((event.start, 1, activity), (event.stop, -1, activity))
    return tuple(_sum_by_activity(own, timeline.seconds) for own in changes)


def _sum_by_activity(changes: list[tuple[float, int, str]], seconds: float) -> dict[str, float]:
    """Return the time per activity from `changes`: (time, +1 at a begin or -1 at an end, activity)."""
    found = dict.fromkeys(("computes", "bubble"), 0.0)
    active: Counter[str] = Counter()
    now = 0.0
    for moment, change, activity in [*sorted(changes), (seconds, 0, "bubble")]:
        # overlapping activities count once: as a bubble, else as a wait, else as work
        order = {"bubble": 0, "computes": 2, "update": 2, "around": 2}
        now_active = (one for one, count in active.items() if count)
        counted = min(now_active, key=lambda one: order.get(one, 1), default="bubble")
        found[counted] = found.get(counted, 0.0) + moment - now
        active[activity] += change
        now = moment
    return {activity: time for activity, time in found.items() if time or activity in ("computes", "bubble")}


def _activity(event: Event) -> str | None:
    """Return the activity that an event counts as, or None for an event in the background."""
    if event.is_background:
        return None
    if event.row is TimelineRow.COMPUTE:
        return "computes"
    if event.row is TimelineRow.WAIT:
        return f"waits for {event.kind.split()[-1]}" if event.exposed else "bubble"
    return "update" if event.kind == "update" else "around"

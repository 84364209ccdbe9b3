"""When everything in a schedule happens, given what it costs: the step's time, the bubbles and the memory.

Every rank does its actions in order. A computation takes its time; a receive waits until the message is there. A send
costs the rank nothing: the message leaves at once, or when the link has carried the one before it. Gathers and
reductions run beside the computations, one after the other on each rank; a computation waits for its stage's gather,
and the step for the last reduction.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshwise.pipeline.action import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule, ScheduleError
from meshwise.pipeline.passes import add_transfers, counterpart, receiver
from meshwise.pipeline.validate import walk


@dataclass(frozen=True)
class Cost:
    """What one micro-batch of one stage costs; times in seconds, or in any one unit."""

    forward: float = 1.0
    """Time of F."""

    input: float = 1.0
    """Time of I."""

    weight: float = 1.0
    """Time of W. B takes `input + weight`."""

    link: float = 0.0
    """Time for this stage's output to reach the next stage's rank, or for its gradient to come back."""

    gather: float = 0.0
    """Time to make the stage's parameters whole."""

    reduce: float = 0.0
    """Time to reduce its gradients."""

    held: float = 1.0
    """Activations kept from F to the end of the backward, in bytes, or in micro-batches."""

    kept: float = 1.0
    """The part of them that I leaves for W."""


@dataclass(frozen=True)
class Event:
    """An action and when it happens. For a send: when the message is on the link."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timing:
    """A schedule, timed."""

    schedule: Schedule
    events: tuple[Event, ...]
    peaks: tuple[float, ...]
    """The most that each rank holds at a time, in the unit of `Cost.held`."""

    @cached_property
    def seconds(self) -> float:
        """Time of the whole step."""
        return max(event.end for event in self.events)

    @cached_property
    def computing(self) -> tuple[tuple[Event, ...], ...]:
        """The computations of each rank, in order."""
        rows: list[list[Event]] = [[] for _ in range(self.schedule.ranks)]
        for event in self.events:
            if event.action.kind in COMPUTE:
                rows[event.rank].append(event)
        return tuple(map(tuple, rows))

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(event.end - event.start for event in row) for row in self.computing)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The part of the step in which each rank does not compute."""
        return tuple(1 - busy / self.seconds for busy in self.busy)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank does not compute between its first and its last computation.

        The greatest of these is the bubble as it is published: a rank that starts late and ends late by as much
        could spend the difference in the next step, were there no step of the optimizer, common to all, in between.
        """
        spans = (row[-1].end - row[0].start for row in self.computing)
        return tuple(span - busy for span, busy in zip(spans, self.busy, strict=True))


def clock(schedule: Schedule, *, costs: Cost | Sequence[Cost] = Cost()) -> Timing:
    """Time a table, given one cost for all stages or one for each. Transfers are added when it has none.

    Raises ScheduleError for costs of another number of stages, and for a table that deadlocks.
    """
    each = (costs,) * schedule.stages if isinstance(costs, Cost) else tuple(costs)
    if len(each) != schedule.stages:
        raise ScheduleError(f"{len(each)} costs for {schedule.stages} stages; give one for each, or one for all")
    lowered = add_transfers(schedule)
    run = _Run(lowered, each)
    events = tuple(run.event(rank, action) for rank, action in walk(lowered))
    return Timing(lowered, events, tuple(_peak(row, each) for row in lowered.rows))


def _peak(row: tuple[Action, ...], costs: Sequence[Cost]) -> float:
    held = peak = 0.0
    for action in row:
        cost = costs[action.stage]
        held += {
            Kind.F: cost.held,
            Kind.B: -cost.held,
            Kind.I: -cost.held * (1 - cost.kept),
            Kind.W: -cost.held * cost.kept,
        }.get(action.kind, 0.0)
        peak = max(peak, held)
    return peak


@dataclass
class _Run:
    """The clocks of the ranks, of their links and of their collectives."""

    schedule: Schedule
    costs: Sequence[Cost]
    now: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    links: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    arrivals: dict[tuple[int, int], deque[float]] = field(default_factory=lambda: defaultdict(deque))
    collectives: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    whole: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def event(self, rank: int, action: Action) -> Event:
        """Do one action, and move the clocks on."""
        if action.kind in SENDS:
            return self._send(rank, action)
        cost, start = self.costs[action.stage], self.now[rank]
        if action.kind in RECEIVES:
            channel = self.schedule.rank_of[counterpart(action).stage], rank
            end = self.now[rank] = max(start, self.arrivals[channel].popleft())
        elif action.kind in COMPUTE:
            start = max(start, self.whole[action.stage])
            end = self.now[rank] = start + _seconds(action.kind, cost)
        elif action.kind is Kind.FREE:
            end = start
        else:
            start = max(start, self.collectives[rank])
            end = start + (cost.gather if action.kind is Kind.GATHER else cost.reduce)
            self.collectives[rank] = end
            if action.kind is Kind.GATHER:
                self.whole[action.stage] = end
        return Event(rank, action, start, end)

    def _send(self, rank: int, action: Action) -> Event:
        channel = rank, receiver(action, schedule=self.schedule)
        start = max(self.now[rank], self.links[channel])
        end = start + self.costs[action.stage - (action.kind is Kind.SEND_B)].link
        self.links[channel] = end
        self.arrivals[channel].append(end)
        return Event(rank, action, start, end)


def _seconds(kind: Kind, cost: Cost) -> float:
    return {Kind.F: cost.forward, Kind.B: cost.input + cost.weight, Kind.I: cost.input, Kind.W: cost.weight}[kind]

"""When everything in a schedule happens, given what it costs: the step's time, the bubbles and the memory.

Every rank does its actions in order. A computation takes its time; a receive waits until the message is there. A send
costs the rank nothing: the message leaves at once, or when the link has carried the one before it. Gathers and
reductions run beside the computations, one after the other on each rank; a computation waits for its stage's gather,
and the step for the last reduction.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwise.base.timeline import Event, Timeline, TimelineRow
from meshwise.pipeline.schedules.action import COMPUTE, RECEIVES, SENDS, Action, ActionKind, Schedule, ScheduleError
from meshwise.pipeline.schedules.passes import add_transfers, other_end
from meshwise.pipeline.schedules.validate import walk


@dataclass(frozen=True)
class ActionCost:
    """Cost of one micro-batch of one stage; times in seconds, or in any one unit."""

    forward: float = 1.0
    """Time of F."""
    input: float = 1.0
    """Time of I."""
    weight: float = 1.0
    """Time of W."""
    backward: float | None = None
    """Time of B; by default `input + weight`."""
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


def clock(schedule: Schedule, *, costs: ActionCost | Sequence[ActionCost] = ActionCost()) -> Timeline:
    """Time a table, given one cost for all stages or one for each. Transfers are added when it has none.

    An event of a send is when the message is on the link. Raises ScheduleError for costs of another number of stages,
    and for a table that deadlocks.
    """
    lowered = add_transfers(schedule)
    run = _Run(lowered, _each(costs, schedule))
    events = tuple(run.event(rank, action) for rank, action in walk(lowered))
    return Timeline(events, (tuple(range(schedule.ranks)),))


def peaks(schedule: Schedule, *, costs: ActionCost | Sequence[ActionCost] = ActionCost()) -> tuple[float, ...]:
    """Return the most that each rank holds at a time, in the unit of `ActionCost.held`.

    Raises ScheduleError for costs of another number of stages.
    """
    changes = [_changes(cost) for cost in _each(costs, schedule)]
    return tuple(_peak(row, changes) for row in schedule.rows)


class StepClock:
    """The clock of one schedule for many loads, a third of each for F, I and W: how long a step takes.

    Events and their dependencies are computed once; then the time of a step is one pass over them.
    """

    def __init__(self, schedule: Schedule) -> None:
        lowered = add_transfers(schedule)
        self._schedule = schedule
        self._events: list[tuple[int, int, int]] = []
        now: dict[int, int] = defaultdict(int)
        links: dict[tuple[int, int], int] = defaultdict(int)
        arrivals: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        for rank, action in walk(lowered):
            number = len(self._events) + 1
            if action.kind in SENDS:
                channel = rank, other_end(action, schedule=lowered)
                edge = action.stage - (action.kind is ActionKind.SEND_B)
                event = now[rank], links[channel], 2 * schedule.stages + 1 + edge
                links[channel] = number
                arrivals[channel].append(number)
            elif action.kind in RECEIVES:
                event = now[rank], arrivals[other_end(action, schedule=lowered), rank].popleft(), 0
            else:
                event = now[rank], now[rank], 1 + 2 * action.stage + (action.kind is ActionKind.B)
            if action.kind not in SENDS:
                now[rank] = number
            self._events.append(event)

    def __len__(self) -> int:
        """Return the number of events in a step."""
        return len(self._events)

    def __call__(self, *, loads: Sequence[float], crossing: Sequence[float] = (), limit: float = math.inf) -> float:
        """Return the step's time when micro-batches take each stage and each edge so long.

        Infinite when a rank alone has to compute for as long as `limit`.
        """
        ranks = [0.0] * self._schedule.ranks
        for load, rank in zip(loads, self._schedule.rank_of, strict=True):
            ranks[rank] += load * self._schedule.microbatches
        if max(ranks) >= limit:
            return math.inf
        thirds = [part for load in loads for part in (load / 3, 2 * load / 3)]
        taken = [0.0, *thirds, *(crossing or [0.0] * len(loads))]
        ends = [0.0]
        for first, second, what in self._events:
            start, other = ends[first], ends[second]
            ends.append((start if start > other else other) + taken[what])  # noqa: FURB136 -- a call takes longer
        return max(ends)


def _each(costs: ActionCost | Sequence[ActionCost], schedule: Schedule) -> tuple[ActionCost, ...]:
    each = (costs,) * schedule.stages if isinstance(costs, ActionCost) else tuple(costs)
    if len(each) != schedule.stages:
        raise ScheduleError(f"{len(each)} costs for {schedule.stages} stages; give one for each, or one for all")
    return each


def _peak(row: tuple[Action, ...], changes: Sequence[Mapping[ActionKind, float]]) -> float:
    held = peak = 0.0
    for action in row:
        held += changes[action.stage].get(action.kind, 0.0)
        peak = max(peak, held)
    return peak


def _changes(cost: ActionCost) -> Mapping[ActionKind, float]:
    """Return the change in a rank's memory per kind of action."""
    return {
        ActionKind.F: cost.held,
        ActionKind.B: -cost.held,
        ActionKind.I: -cost.held * (1 - cost.kept),
        ActionKind.W: -cost.held * cost.kept,
    }


@dataclass
class _Run:
    """The clocks of the ranks, of their links and of their collectives."""

    schedule: Schedule
    costs: Sequence[ActionCost]
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
            channel = other_end(action, schedule=self.schedule), rank
            end = self.now[rank] = max(start, self.arrivals[channel].popleft())
        elif action.kind in COMPUTE:
            start = max(start, self.whole[action.stage])
            end = self.now[rank] = start + _seconds(action.kind, cost)
        elif action.kind is ActionKind.FREE:
            end = start
        else:
            start = max(start, self.collectives[rank])
            end = start + (cost.gather if action.kind is ActionKind.GATHER else cost.reduce)
            self.collectives[rank] = end
            if action.kind is ActionKind.GATHER:
                self.whole[action.stage] = end
        return event_of(action, rank=rank, start=start, stop=end)

    def _send(self, rank: int, action: Action) -> Event:
        channel = rank, other_end(action, schedule=self.schedule)
        start = max(self.now[rank], self.links[channel])
        end = start + self.costs[action.stage - (action.kind is ActionKind.SEND_B)].link
        self.links[channel] = end
        self.arrivals[channel].append(end)
        return event_of(action, rank=rank, start=start, stop=end)


def event_of(action: Action, *, rank: int, start: float, stop: float) -> Event:
    """Return the event that an action is."""
    if action.kind in COMPUTE:
        stream = TimelineRow.COMPUTE
    elif action.kind in RECEIVES:
        stream = TimelineRow.WAIT
    else:
        stream = TimelineRow.LINK if action.kind in SENDS else TimelineRow.COLLECTIVE
    return Event(rank, stream, action.kind, start, stop, action.stage, action.microbatch)


def _seconds(kind: ActionKind, cost: ActionCost) -> float:
    whole = cost.input + cost.weight if cost.backward is None else cost.backward
    return {ActionKind.F: cost.forward, ActionKind.B: whole, ActionKind.I: cost.input, ActionKind.W: cost.weight}[kind]

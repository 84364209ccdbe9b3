"""Compute the timeline of a schedule from the costs of its actions: a step's time and the bubbles.

Every rank runs its actions in order. A computation takes its time; a receive waits until the message has arrived. A
send takes no time of the rank: the message leaves at once, or when the message before it has left the link. Gathers
and reductions overlap with computations, and run one after the other on each rank. A computation waits for the gather
of its stage, and the step waits for the last reduction."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwise.base.step_timeline import Event, Timeline, TimelineRow
from meshwise.pipeline.schedules.schedule_table import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    add_transfers,
    walk,
)


@dataclass(frozen=True)
class ActionCost:
    """Times of one micro-batch in one stage, in seconds or all in another unit: of F, I, W and B, and of messages."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    backward: float | None = None
    """Time of B; None: `input + weight`."""
    link: float = 0.0
    """Time to send this stage's output to the next stage's rank, and to send its gradient back."""
    gather: float = 0.0
    reduce: float = 0.0
    """Time to reduce the stage's gradients; `gather`: time to gather its parameters."""


def clock(schedule: Schedule, *, costs: ActionCost | Sequence[ActionCost] = ActionCost()) -> Timeline:
    """Return the timeline of a table. `costs`: one for all stages, or one per stage. Missing transfers are added.

    The event of a send lasts as long as the message is on the link. Raises ScheduleError when the number of costs is
    not the number of stages, and for a table that deadlocks."""
    each = (costs,) * schedule.stages if isinstance(costs, ActionCost) else tuple(costs)
    if len(each) != schedule.stages:
        raise ScheduleError(f"{len(each)} costs for {schedule.stages} stages; give one for each, or one for all")
    lowered, events = add_transfers(schedule), []
    now, links, collectives, gathered = (defaultdict[Any, float](float) for _ in range(4))
    arrivals: dict[tuple[int, int], deque[float]] = defaultdict(deque)
    for rank, action in walk(lowered):
        kind, before = action.kind, now[rank]
        end = (rank, lowered.other_end(action)) if kind in SENDS | RECEIVES else (rank, rank)
        if kind in SENDS:
            other = links[end]  # the message before has left
        elif kind in RECEIVES:
            other = arrivals[end[::-1]].popleft()
        else:
            other = gathered[action.stage] if kind in COMPUTE else collectives[rank]
        start = before if kind is ActionKind.FREE else max(before, other)
        stop = start + _seconds(action, each)
        if kind in COMPUTE | RECEIVES:
            now[rank] = stop
        elif kind in SENDS:
            links[end] = stop
            arrivals[end].append(stop)
        elif kind is not ActionKind.FREE:
            collectives[rank] = stop
            if kind is ActionKind.GATHER:
                gathered[action.stage] = stop
        events.append(event_of(action, rank=rank, start=before if kind in RECEIVES else start, stop=stop))
    return Timeline(tuple(events), (tuple(range(schedule.ranks)),))


def event_of(action: Action, *, rank: int, start: float, stop: float) -> Event:
    """Return an action as an event of a timeline."""
    if action.kind in COMPUTE:
        stream = TimelineRow.COMPUTE
    elif action.kind in RECEIVES:
        stream = TimelineRow.WAIT
    else:
        stream = TimelineRow.LINK if action.kind in SENDS else TimelineRow.COLLECTIVE
    return Event(rank, stream, action.kind, start, stop, action.stage, action.microbatch)


def _seconds(action: Action, costs: Sequence[ActionCost]) -> float:
    """Return the duration of an action; a receive takes no time once its message has arrived."""
    cost, kind = costs[action.stage], action.kind
    if kind in SENDS:
        return costs[action.stage - (kind is ActionKind.SEND_B)].link
    durations = {
        ActionKind.F: cost.forward,
        ActionKind.B: cost.input + cost.weight if cost.backward is None else cost.backward,
        ActionKind.I: cost.input,
        ActionKind.W: cost.weight,
        ActionKind.GATHER: cost.gather,
        ActionKind.REDUCE: cost.reduce,
    }
    return durations.get(kind, 0.0)

"""Check that a schedule's table can run: it has each forward and backward once and in order, and no rank deadlocks.

A faulty schedule hangs, or trains on wrong gradients. Both can be seen in the table before a run starts."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import accumulate

from meshwise.pipeline.schedules.action import COMPUTE, RECEIVES, SENDS, Action, ActionKind, Schedule, ScheduleError
from meshwise.pipeline.schedules.passes import add_transfers, counterpart, other_end, received


def validate(schedule: Schedule) -> None:
    """Check a table of computations. Raises ScheduleError with the fault, its rank and its action."""
    if added := [action for action in schedule.actions() if action.kind not in COMPUTE]:
        raise ScheduleError(f"{added[0]} is added when the table is run; write F, B, I and W only")
    _check_counts(schedule)
    for rank, row in enumerate(schedule.rows):
        _check_order(schedule, rank, row)
    for _ in walk(add_transfers(schedule)):
        pass


def walk(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield the (rank, action) of a table with transfers, in an order in which they can happen.

    Sends do not wait. A receive waits for the next message of its channel; each pair (sender, receiver) has a channel.
    Raises ScheduleError when all unfinished ranks wait for messages."""
    channels: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    place = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while place[rank] < len(row):
                action = row[place[rank]]
                if action.kind in RECEIVES:
                    source = other_end(action, schedule=schedule)
                    if not channels[source, rank]:
                        break
                    arrived = channels[source, rank].popleft()
                    assert arrived == action, f"rank {rank} is at {action}, but the next message is {arrived}"
                elif action.kind in SENDS:
                    channels[rank, other_end(action, schedule=schedule)].append(counterpart(action))
                yield rank, action
                place[rank] += 1
                moved = True
    waits = {rank: row[place[rank]] for rank, row in enumerate(schedule.rows) if place[rank] < len(row)}
    if waits:
        places = ", ".join(f"rank {rank} in {action}" for rank, action in waits.items())
        raise ScheduleError(f"the schedule deadlocks: {places} wait for messages that are never sent")
    assert not any(channels.values()), "messages are sent that no rank receives"


_KEPT: Mapping[ActionKind, float] = {ActionKind.F: 1.0, ActionKind.B: -1.0, ActionKind.W: -1.0}
"""Change of the number of micro-batches whose activations a stage keeps, by kind of action."""


def in_flight(schedule: Schedule) -> tuple[float, ...]:
    """Return, for each stage, the largest number of micro-batches whose activations the stage keeps at one time."""
    return tuple(
        max(accumulate(_KEPT.get(action.kind, 0.0) for action in schedule.rows[rank] if action.stage == stage))
        for stage, rank in enumerate(schedule.rank_of)
    )


def peaks(schedule: Schedule) -> tuple[float, ...]:
    """Return, for each rank, the largest number of micro-batches that its stages together keep at one time."""
    return tuple(max(accumulate(_KEPT.get(action.kind, 0.0) for action in row)) for row in schedule.rows)


def _check_counts(schedule: Schedule) -> None:
    """Check that every stage has one forward and one backward, B or I and W, of every micro-batch."""
    counts = Counter(schedule.actions())
    if twice := [action for action, count in counts.items() if count > 1]:
        raise ScheduleError(f"rank {schedule.rank_of[twice[0].stage]} does {twice[0]} twice")
    for stage, rank in enumerate(schedule.rank_of):
        for index in range(schedule.microbatches):
            f, b, i, w = (
                Action(stage, kind, index) in counts
                for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
            )
            if not f:
                raise ScheduleError(f"rank {rank} has no {stage}F{index}")
            if b + (i and w) != 1 or (b and (i or w)):
                done = [f"{stage}{kind}{index}" for kind, given in (("B", b), ("I", i), ("W", w)) if given]
                raise ScheduleError(
                    f"rank {rank} has {' and '.join(done) or 'no backward'} for stage {stage}, micro-batch {index}; "
                    f"give it {stage}B{index}, or {stage}I{index} and {stage}W{index}"
                )


def _check_order(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> None:
    """Check that a rank computes nothing before those inputs that the rank itself computes."""
    seen: set[Action] = set()
    for action in row:
        for alternatives in _before(schedule, action):
            if not seen.intersection(alternatives):
                raise ScheduleError(f"rank {rank} does {action} before {' or '.join(map(str, alternatives))}")
        seen.add(action)


def _before(schedule: Schedule, action: Action) -> Iterator[tuple[Action, ...]]:
    """Yield tuples of actions; one action of each tuple must come earlier in the same row."""
    stage, kind, index = action.stage, action.kind, action.microbatch
    if kind in (ActionKind.B, ActionKind.I):
        yield (Action(stage, ActionKind.F, index),)
    if kind is ActionKind.W:
        yield (Action(stage, ActionKind.I, index),)
    if received(action, schedule=schedule) is not None:
        return  # from another rank: `walk` waits for the message
    if kind is ActionKind.F and stage > 0:
        yield (Action(stage - 1, ActionKind.F, index),)
    elif kind in (ActionKind.B, ActionKind.I) and stage + 1 < schedule.stages:
        yield (Action(stage + 1, ActionKind.B, index), Action(stage + 1, ActionKind.I, index))

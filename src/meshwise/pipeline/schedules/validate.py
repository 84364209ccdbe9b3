"""Check that a table can run: all is computed once and in order, every message is sent and received, no rank waits for
ever.

A faulty schedule hangs, or trains on the wrong gradients, on a cluster and at step 1. All of this follows from the
table, before anything starts.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator

from meshwise.pipeline.schedules.action import (
    COMPUTE,
    RECEIVES,
    SENDS,
    UNITS,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
)
from meshwise.pipeline.schedules.passes import add_transfers, counterpart, other_end, received, sent


def validate(schedule: Schedule) -> tuple[float, ...]:
    """Check a table, with transfers or, when it has none, as `add_transfers` completes it.

    Returns what each rank holds at most: micro-batches times stages between their forward and the end of their
    backward. Raises ScheduleError saying what is wrong, on which rank, at which action.
    """
    _once(schedule)
    lowered = add_transfers(schedule)
    _transfers(lowered)
    for rank, row in enumerate(lowered.rows):
        _ordered(lowered, rank, row)
        _units(rank, row)
    for _ in walk(lowered):
        pass
    return tuple(max(held_after(row), default=0.0) for row in schedule.rows)


def walk(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield the (rank, action) of a table with transfers, in an order in which they can happen.

    Sends do not wait; a receive waits for the next message of its channel, and there is one channel from each rank to
    each other. Raises ScheduleError when messages arrive in another order than they are received in, and when all
    ranks that are left wait for each other.
    """
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
                    if (arrived := channels[source, rank].popleft()) != action:
                        raise ScheduleError(
                            f"rank {rank} receives {action} from rank {source}, but the next message is {arrived}; "
                            "receive in the order in which the other rank sends"
                        )
                elif action.kind in SENDS:
                    channels[rank, other_end(action, schedule=schedule)].append(counterpart(action))
                yield rank, action
                place[rank] += 1
                moved = True
    waits = {rank: row[place[rank]] for rank, row in enumerate(schedule.rows) if place[rank] < len(row)}
    if waits:
        told = ", ".join(f"rank {rank} in {action}" for rank, action in waits.items())
        raise ScheduleError(f"the schedule deadlocks: {told} wait for messages that are never sent")
    if left := [(ranks, list(channel)) for ranks, channel in channels.items() if channel]:
        (source, rank), messages = left[0]
        raise ScheduleError(f"rank {rank} never receives {messages[0]}, which rank {source} sends")


def held_after(row: tuple[Action, ...]) -> Iterator[float]:
    """After each action of a row, how many micro-batches (times stages) the rank holds activations of."""
    held = 0
    for action in row:
        held += (action.kind is ActionKind.F) - (action.kind in (ActionKind.B, ActionKind.W))
        yield float(held)


def in_flight(schedule: Schedule) -> tuple[float, ...]:
    """Return, per stage, the largest number of micro-batches whose activations are held at once."""
    rows = [[action for action in schedule.rows[rank] if action.stage == s] for s, rank in enumerate(schedule.rank_of)]
    return tuple(max(held_after(tuple(row)), default=0.0) for row in rows)


def _once(schedule: Schedule) -> None:
    """Every stage has one forward and one backward, whole or in two parts, of every micro-batch."""
    counts = Counter(action for action in schedule.actions() if action.kind not in UNITS - {ActionKind.REDUCE})
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


def _transfers(schedule: Schedule) -> None:
    """Check that exactly the values that other ranks compute with are sent."""
    needed = {send for send in (sent(action, schedule=schedule) for action in schedule.actions()) if send is not None}
    for kinds, wanted, verb in (
        (SENDS, needed, "sends"),
        (RECEIVES, {counterpart(send) for send in needed}, "receives"),
    ):
        given = {action for action in schedule.actions() if action.kind in kinds}
        for action in sorted(wanted - given):
            raise ScheduleError(f"rank {schedule.rank_of[action.stage]} never {verb} {action}")
        for action in sorted(given - wanted):
            raise ScheduleError(f"rank {schedule.rank_of[action.stage]} {verb} {action}, which no rank needs")


def _ordered(schedule: Schedule, rank: int, row: tuple[Action, ...]) -> None:
    seen: set[Action] = set()
    for action in row:
        for alternatives in _before(schedule, action):
            if not seen.intersection(alternatives):
                raise ScheduleError(f"rank {rank} does {action} before {' or '.join(map(str, alternatives))}")
        seen.add(action)


def _before(schedule: Schedule, action: Action) -> Iterator[tuple[Action, ...]]:
    """Yield tuples of actions; one action of each tuple must come earlier in the same row."""
    stage, kind, index = action.stage, action.kind, action.microbatch
    backward = (Action(stage, ActionKind.B, index), Action(stage, ActionKind.I, index))
    if kind in (ActionKind.SEND_F, ActionKind.B, ActionKind.I):
        yield (Action(stage, ActionKind.F, index),)
    if kind is ActionKind.SEND_B:
        yield backward
    if kind is ActionKind.W:
        yield backward[1:]
    receive = received(action, schedule=schedule)
    if receive is not None:
        yield (receive,)
    elif kind is ActionKind.F and stage > 0:
        yield (Action(stage - 1, ActionKind.F, index),)
    elif kind in (ActionKind.B, ActionKind.I) and stage + 1 < schedule.stages:
        yield (Action(stage + 1, ActionKind.B, index), Action(stage + 1, ActionKind.I, index))


def _units(rank: int, row: tuple[Action, ...]) -> None:
    """Stages that are gathered at all are whole when they compute; a stage is reduced after all its backwards."""
    sharded = {action.stage for action in row if action.kind is ActionKind.GATHER}
    whole: set[int] = set()
    reduced: set[int] = set()
    for action in row:
        stage = action.stage
        if action.kind is ActionKind.GATHER:
            if stage in whole:
                raise ScheduleError(f"rank {rank} does {action}, but stage {stage} is whole already")
            whole.add(stage)
        elif action.kind is ActionKind.FREE:
            if stage not in whole:
                raise ScheduleError(f"rank {rank} does {action}, but stage {stage} is not gathered")
            whole.remove(stage)
        elif action.kind is ActionKind.REDUCE:
            reduced.add(stage)
        elif action.kind in COMPUTE:
            if stage in sharded - whole:
                raise ScheduleError(f"rank {rank} does {action} while stage {stage} is not gathered")
            if stage in reduced and action.kind in (ActionKind.B, ActionKind.W):
                raise ScheduleError(f"rank {rank} does {action} after {stage}REDUCE")
    if whole:
        raise ScheduleError(f"rank {rank} never frees stage {min(whole)}")
    done = {action.stage for action in row if action.kind in COMPUTE}
    if reduced and (missing := done - reduced):
        raise ScheduleError(f"rank {rank} reduces stage {min(reduced)}, but never stage {min(missing)}")

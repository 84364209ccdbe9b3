"""Complete a schedule by passes from one table to another: transfers, gathers, reductions, early sends.

`lower` applies the passes that a run needs; docs/pipeline.md has the actions that they add."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise

from meshwise.pipeline.schedules.action import COMPUTE, RECEIVES, SENDS, Action, ActionKind, Schedule

_OTHER_END: Mapping[ActionKind, tuple[int, ActionKind]] = {
    ActionKind.SEND_F: (1, ActionKind.RECV_F),
    ActionKind.RECV_F: (-1, ActionKind.SEND_F),
    ActionKind.SEND_B: (-1, ActionKind.RECV_B),
    ActionKind.RECV_B: (1, ActionKind.SEND_B),
}
"""For each kind of transfer, (stages to the other end, kind of the action at the other end)."""


@lru_cache(maxsize=8)
def lower(schedule: Schedule, *, gathers: bool) -> Schedule:
    """Return the table of computations with the other actions of a run. `gathers`: parameters are sharded (ZeRO-3)."""
    reduced = add_reductions(schedule)
    return merge_backward(add_transfers(add_gathers(reduced) if gathers else reduced))


def send_first(schedule: Schedule) -> Schedule:
    """Return the table with each B after a rank's last forward replaced by I and W.

    After its last forward, a rank only waits for gradients. In a B, each stage computes its weights' gradients before
    it sends its input's gradient. This makes (p - 1) w of 1F1B's bubble (p - 1) (f + i + w), where w is at most f.
    With I W, no activation is kept for longer, because W follows at once."""
    rows = []
    for row in schedule.rows:
        last = max((place for place, action in enumerate(row) if action.kind is ActionKind.F), default=-1) + 1
        late: list[Action] = []
        for action in row[last:]:
            kinds = (ActionKind.I, ActionKind.W) if action.kind is ActionKind.B else (action.kind,)
            late += (action._replace(kind=kind) for kind in kinds)
        rows.append((*row[:last], *late))
    return Schedule(tuple(rows))


def merge_backward(schedule: Schedule) -> Schedule:
    """Return the table with B in place of every I that is directly followed by its own W.

    In a table with transfers, no send lies between such an I and its W, so no other rank waits longer."""
    return Schedule(tuple(tuple(_merged(row)) for row in schedule.rows))


def _merged(row: tuple[Action, ...]) -> Iterator[Action]:
    skip = False
    for action, following in pairwise((*row, None)):
        assert action is not None
        merges = action.kind is ActionKind.I and following == Action(action.stage, ActionKind.W, action.microbatch)
        if not skip:
            yield Action(action.stage, ActionKind.B, action.microbatch) if merges else action
        skip = merges


@lru_cache(maxsize=8)
def add_transfers(schedule: Schedule) -> Schedule:
    """Add a send after each value that another rank needs, and a receive before the use of the value.

    Messages between two ranks are received in the order in which they were sent, because a transport may match them
    by order alone. So a rank that needs a later message receives the earlier messages first. A table that already has
    transfers is returned unchanged."""
    if any(action.kind in SENDS | RECEIVES for action in schedule.actions()):
        return schedule
    channels: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    for rank, row in enumerate(schedule.rows):
        for message in (sent(action, schedule=schedule) for action in row):
            if message is not None:
                channels[rank, other_end(message, schedule=schedule)].append(counterpart(message))
    waiting = {message for channel in channels.values() for message in channel}
    rows = []
    for rank, row in enumerate(schedule.rows):
        lowered: list[Action] = []
        for action in row:
            receive = received(action, schedule=schedule)
            if receive is not None:
                channel = channels[other_end(receive, schedule=schedule), rank]
                while receive in waiting:
                    lowered.append(channel.popleft())
                    waiting.remove(lowered[-1])
            lowered.append(action)
            send = sent(action, schedule=schedule)
            lowered += [send] if send is not None else []
        rows.append(tuple(lowered))
    return Schedule(tuple(rows))


def sent(action: Action, *, schedule: Schedule) -> Action | None:
    """Return the send that follows a computation; None if the next stage is on the same rank or does not exist."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is ActionKind.F and _crosses(schedule, stage, stage + 1):
        return Action(stage, ActionKind.SEND_F, microbatch)
    if kind in (ActionKind.B, ActionKind.I) and _crosses(schedule, stage - 1, stage):
        return Action(stage, ActionKind.SEND_B, microbatch)
    return None


def received(action: Action, *, schedule: Schedule) -> Action | None:
    """Return the receive that a computation waits for; None if its input comes from the same rank or the batch."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is ActionKind.F and _crosses(schedule, stage - 1, stage):
        return Action(stage, ActionKind.RECV_F, microbatch)
    if kind in (ActionKind.B, ActionKind.I) and _crosses(schedule, stage, stage + 1):
        return Action(stage, ActionKind.RECV_B, microbatch)
    return None


def counterpart(action: Action) -> Action:
    """Return the matching receive for a send, or the matching send for a receive."""
    step, kind = _OTHER_END[action.kind]
    return Action(action.stage + step, kind, action.microbatch)


def other_end(transfer: Action, *, schedule: Schedule) -> int:
    """Return the rank that a send goes to, or a receive comes from."""
    return schedule.rank_of[transfer.stage + _OTHER_END[transfer.kind][0]]


def lines_of(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Return (source rank, target rank) of all messages of a schedule."""
    rows = enumerate(schedule.rows)
    return frozenset(
        (rank, other_end(action, schedule=schedule)) for rank, row in rows for action in row if action.kind in SENDS
    )


def _crosses(schedule: Schedule, stage: int, following: int) -> bool:
    """Return whether the neighbouring stages `stage` and `following` both exist and are on different ranks."""
    return stage >= 0 and following < schedule.stages and schedule.rank_of[stage] != schedule.rank_of[following]


def add_reductions(schedule: Schedule) -> Schedule:
    """Return the table with a REDUCE after the last backward of each stage."""
    rows = []
    for row in schedule.rows:
        last = {action.stage: place for place, action in enumerate(row) if action.kind in (ActionKind.B, ActionKind.W)}
        rows.append(
            tuple(
                added
                for place, action in enumerate(row)
                for added in (action, Action(action.stage, ActionKind.REDUCE))
                if added is action or last.get(action.stage) == place
            )
        )
    return Schedule(tuple(rows))


def add_gathers(schedule: Schedule) -> Schedule:
    """Add a GATHER one computation before the first computation of each stage, and a FREE after its last one."""
    return Schedule(tuple(tuple(_gathered(row)) for row in schedule.rows))


def _gathered(row: tuple[Action, ...]) -> Iterator[Action]:
    computed = [action.stage for action in row if action.kind in COMPUTE]
    last_use = {stage: place for place, stage in enumerate(computed)}
    gathered_at = {stage: max(0, computed.index(stage) - 1) for stage in last_use}
    place = 0
    for action in row:
        if action.kind in COMPUTE:
            yield from (Action(stage, ActionKind.FREE) for stage, last in last_use.items() if last == place - 1)
            yield from (Action(stage, ActionKind.GATHER) for stage, at in gathered_at.items() if at == place)
            place += 1
        yield action
    yield from (Action(stage, ActionKind.FREE) for stage, last in last_use.items() if last == place - 1)

"""Represent a pipeline schedule as a table: for each rank, its actions in order.

A schedule written as control flow can only be run. A table can also be checked before it runs, timed, drawn, compared
with another table, and read from a file. One interpreter runs all tables. A function that builds a schedule returns
only the computations. Passes turn one table into another: `lower` adds the sends, receives, gathers and reductions that
a run needs, `send_first` sends gradients earlier. See docs/pipeline.md.

A faulty schedule hangs, or trains on wrong gradients. `validate` finds both in the table before a run starts: each
forward and backward is there once, in order, and no rank deadlocks. `in_flight` and `peaks` count kept activations."""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from meshwise.plan import PlanError


class ScheduleError(PlanError):
    """Error for a schedule that cannot run, or not with the given number of ranks, stages or micro-batches."""


class ActionKind(StrEnum):
    """Kinds of actions. F, B, I and W compute; B does the work of I and W together."""

    F = "F"  # forward
    B = "B"  # backward, whole
    I = "I"  # backward with respect to the stage's input  # noqa: E741 - the name the literature gives it
    W = "W"  # backward with respect to the stage's weights
    SEND_F = "SEND_F"  # the stage's output, to the next stage
    RECV_F = "RECV_F"  # the stage's input, from the stage before
    SEND_B = "SEND_B"  # the gradient of the stage's input, to the stage before
    RECV_B = "RECV_B"  # the gradient of the stage's output, from the next stage
    GATHER = "GATHER"  # gather the stage's sharded parameters (ZeRO-3)
    FREE = "FREE"  # free the gathered parameters
    REDUCE = "REDUCE"  # sum the stage's gradients over the ranks that hold the same stage


COMPUTE = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})
SENDS = frozenset({ActionKind.SEND_F, ActionKind.SEND_B})
RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})
"""Kinds that wait for a message from another rank."""
_PER_STAGE = frozenset({ActionKind.GATHER, ActionKind.FREE, ActionKind.REDUCE})
"""Kinds that concern all parameters of a stage, so that their actions name no micro-batch."""

_ACTION = re.compile(rf"(\d+)({'|'.join(sorted(ActionKind, key=len, reverse=True))})(\d*)")


class Action(NamedTuple):
    """One action of a rank for a stage; prints as stage, kind and micro-batch: `2F0`, `2SEND_F0`, `2GATHER`."""

    stage: int
    kind: ActionKind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Return the action that prints as `text`. Raises ScheduleError for any other text."""
        if (found := _ACTION.fullmatch(text)) is None:
            raise ScheduleError(f"{text!r} is not an action; write stage, kind and micro-batch as in 2F0 or 2SEND_F0")
        stage, kind, microbatch = found.groups()
        if (ActionKind(kind) in _PER_STAGE) == bool(microbatch):
            form = f"{stage}{kind}" if microbatch else f"{stage}{kind}0"
            raise ScheduleError(f"{text!r} is not an action; {kind} is written as in {form}")
        return cls(int(stage), ActionKind(kind), int(microbatch) if microbatch else None)

    @property
    def counterpart(self) -> "Action":
        """The matching receive of a send, or the matching send of a receive."""
        step, kind = _OTHER_END[self.kind]
        return Action(self.stage + step, kind, self.microbatch)


@dataclass(frozen=True)
class Schedule:
    """Table with one row of actions per rank along `pp`. Prints one line per row, which `parse` reads."""

    rows: tuple[tuple[Action, ...], ...]

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage, by stage. Raises ScheduleError when a stage is on no rank, or on two ranks."""
        ranks: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                if (owner := ranks.setdefault(action.stage, rank)) != rank:
                    raise ScheduleError(f"stage {action.stage} is on rank {owner}, but rank {rank} does {action}")
        if missing := sorted(set(range(max(ranks, default=0) + 1)) - ranks.keys()):
            raise ScheduleError(f"no rank does anything for stage {', '.join(map(str, missing))}")
        return tuple(ranks[stage] for stage in range(len(ranks)))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.rank_of)

    @cached_property
    def microbatches(self) -> int:
        """Number of micro-batches of a step."""
        return 1 + max((a.microbatch for a in self.actions() if a.microbatch is not None), default=-1)

    @cached_property
    def splits_backward(self) -> bool:
        """True if some backward is in two parts, I and W."""
        return any(action.kind is ActionKind.I for action in self.actions())

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    def actions(self) -> Iterator[Action]:
        """Yield all actions, rank by rank."""
        return (action for row in self.rows for action in row)

    def other_end(self, transfer: Action) -> int:
        """Return the rank that a send goes to, or a receive comes from."""
        return self.rank_of[transfer.counterpart.stage]

    @property
    def message_pairs(self) -> frozenset[tuple[int, int]]:
        """The pairs (source rank, target rank) between which messages are sent."""
        rows = enumerate(self.rows)
        return frozenset((rank, self.other_end(action)) for rank, row in rows for action in row if action.kind in SENDS)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Return the table in a text with one line per rank. Words of dots, empty lines and `#` comments are ignored.

        Raises ScheduleError, with the line, for a word that is not an action, and for a text without actions."""
        rows = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.partition("#")[0].split()
            try:
                row = tuple(Action.parse(word) for word in words if set(word) != {"."})
            except ScheduleError as error:
                raise ScheduleError(f"line {number}: {error}") from None
            if words:
                rows.append(row)
        if not rows:
            raise ScheduleError("the table is empty; write one line of actions per rank, as in '0F0 0F1 0B0 0B1'")
        return cls(tuple(rows))


_MESSAGES: Mapping[ActionKind, tuple[ActionKind, ActionKind]] = {
    ActionKind.F: (ActionKind.RECV_F, ActionKind.SEND_F),
    ActionKind.B: (ActionKind.RECV_B, ActionKind.SEND_B),
    ActionKind.I: (ActionKind.RECV_B, ActionKind.SEND_B),
}
"""For each kind of computation with messages, (kind of the receive before it, kind of the send after it)."""
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

    docs/pipeline.md says how much shorter the bubble is ("Schedules are tables"). I and W keep no activation for longer
    than B, because W follows I at once."""
    rows = []
    for row in schedule.rows:
        last = max((place for place, action in enumerate(row) if action.kind is ActionKind.F), default=-1) + 1
        parts = {ActionKind.B: (ActionKind.I, ActionKind.W)}
        late = (one._replace(kind=kind) for one in row[last:] for kind in parts.get(one.kind, (one.kind,)))
        rows.append((*row[:last], *late))
    return Schedule(tuple(rows))


def merge_backward(schedule: Schedule) -> Schedule:
    """Return the table with B in place of every I that is directly followed by its own W.

    In a table with transfers, no send lies between such an I and its W, so no other rank waits longer."""
    rows = []
    for row in schedule.rows:
        merged: list[Action] = []
        for action in row:
            if action.kind is ActionKind.W and merged and merged[-1] == action._replace(kind=ActionKind.I):
                merged[-1] = action._replace(kind=ActionKind.B)
            else:
                merged.append(action)
        rows.append(tuple(merged))
    return Schedule(tuple(rows))


@lru_cache(maxsize=8)
def add_transfers(schedule: Schedule) -> Schedule:
    """Add a send after each value that another rank needs, and a receive before the use of the value.

    Messages between two ranks are received in the order in which they were sent, because a transport may match them
    by order alone. So a rank that needs a later message gets the earlier ones first. A table with transfers stays."""
    if any(action.kind in SENDS | RECEIVES for action in schedule.actions()):
        return schedule
    channels: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    for rank, row in enumerate(schedule.rows):
        for message in (_message(action, schedule, after=True) for action in row):
            if message is not None:
                channels[rank, schedule.other_end(message)].append(message.counterpart)
    waiting = {message for channel in channels.values() for message in channel}
    rows = []
    for rank, row in enumerate(schedule.rows):
        lowered: list[Action] = []
        for action in row:
            if (receive := _message(action, schedule, after=False)) is not None:
                channel = channels[schedule.other_end(receive), rank]
                while receive in waiting:
                    lowered.append(channel.popleft())
                    waiting.remove(lowered[-1])
            lowered.append(action)
            send = _message(action, schedule, after=True)
            lowered += [send] if send is not None else []
        rows.append(tuple(lowered))
    return Schedule(tuple(rows))


def _message(action: Action, schedule: Schedule, *, after: bool) -> Action | None:
    """Return the send after a computation, or the receive before it; None if no other rank is at the other end."""
    if action.kind not in _MESSAGES:
        return None
    message = action._replace(kind=_MESSAGES[action.kind][after])
    other, ranks = message.counterpart.stage, schedule.rank_of
    return message if 0 <= other < len(ranks) and ranks[other] != ranks[action.stage] else None


def add_reductions(schedule: Schedule) -> Schedule:
    """Return the table with a REDUCE after the last backward of each stage."""
    rows = []
    for row in schedule.rows:
        last = {action.stage: action for action in row if action.kind in (ActionKind.B, ActionKind.W)}
        ends = ((one, Action(one.stage, ActionKind.REDUCE)) if last.get(one.stage) == one else (one,) for one in row)
        rows.append(tuple(chain.from_iterable(ends)))
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


def validate(schedule: Schedule) -> None:
    """Check a table of computations. Raises ScheduleError with the fault, its rank and its action."""
    if added := [action for action in schedule.actions() if action.kind not in COMPUTE]:
        raise ScheduleError(f"{added[0]} is added when the table is run; write F, B, I and W only")
    _check_counts(schedule)
    for rank, row in enumerate(schedule.rows):
        seen: set[Action] = set()
        for action in row:
            for alternatives in _before(schedule, action):
                if not seen.intersection(alternatives):
                    raise ScheduleError(f"rank {rank} does {action} before {' or '.join(map(str, alternatives))}")
            seen.add(action)
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
                    source = schedule.other_end(action)
                    if not channels[source, rank]:
                        break
                    arrived = channels[source, rank].popleft()
                    assert arrived == action, f"rank {rank} is at {action}, but the next message is {arrived}"
                elif action.kind in SENDS:
                    channels[rank, schedule.other_end(action)].append(action.counterpart)
                yield rank, action
                place[rank] += 1
                moved = True
    if waits := {rank: row[place[rank]] for rank, row in enumerate(schedule.rows) if place[rank] < len(row)}:
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
            f, b, i, w = (Action(stage, kind, index) in counts for kind in map(ActionKind, "FBIW"))
            if not f:
                raise ScheduleError(f"rank {rank} has no {stage}F{index}")
            if b + (i and w) != 1 or (b and (i or w)):
                done = [f"{stage}{kind}{index}" for kind, given in (("B", b), ("I", i), ("W", w)) if given]
                raise ScheduleError(
                    f"rank {rank} has {' and '.join(done) or 'no backward'} for stage {stage}, micro-batch {index}; "
                    f"give it {stage}B{index}, or {stage}I{index} and {stage}W{index}"
                )


def _before(schedule: Schedule, action: Action) -> Iterator[tuple[Action, ...]]:
    """Yield tuples of actions that compute an input on the same rank; one of each tuple must come earlier."""
    stage, kind, index = action.stage, action.kind, action.microbatch
    if kind in (ActionKind.B, ActionKind.I):
        yield (Action(stage, ActionKind.F, index),)
    if kind is ActionKind.W:
        yield (Action(stage, ActionKind.I, index),)
    if _message(action, schedule, after=False) is not None:
        return  # from another rank: `walk` waits for the message
    if kind is ActionKind.F and stage > 0:
        yield (Action(stage - 1, ActionKind.F, index),)
    elif kind in (ActionKind.B, ActionKind.I) and stage + 1 < schedule.stages:
        yield (Action(stage + 1, ActionKind.B, index), Action(stage + 1, ActionKind.I, index))

"""`receive_starts`: no rank waits for ever, even where each computation waits for all messages of its rank."""

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from meshwise.pipeline.schedules.named_schedules import SCHEDULES, planned_schedule
from meshwise.pipeline.schedules.receive_starts import receive_starts
from meshwise.pipeline.schedules.schedule_table import (
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    lower,
    validate,
)

Starts = Mapping[Action, Sequence[Action]]


def stuck(schedule: Schedule, starts: Starts, *, seed: int) -> dict[int, str]:
    """The action at which each rank waits for ever, by rank, if ranks go on by chance, and all but a message begins
    when all sends and receives that its rank has started have their other ends."""
    chances, places, begun = random.Random(seed), [0] * schedule.ranks, set[Action]()
    own: list[set[Action]] = [set() for _ in schedule.rows]

    def begin(rank: int) -> None:
        """Start the messages of the rank's action."""
        action = schedule.rows[rank][places[rank]]
        own[rank].update(starts.get(action, ()), [action] if action.kind in SENDS | RECEIVES else ())
        begun.update(own[rank])

    def moves(rank: int) -> bool:
        action = schedule.rows[rank][places[rank]]
        if action.kind in SENDS | RECEIVES:
            return action.kind in SENDS or action.counterpart in begun
        return all(one.counterpart in begun for one in own[rank])

    left = {rank for rank, row in enumerate(schedule.rows) if row}
    while left:
        for rank in left:
            begin(rank)
        order = sorted(left)
        chances.shuffle(order)
        for rank in order:
            if moves(rank):
                places[rank] += 1
                if places[rank] == len(schedule.rows[rank]):
                    left.discard(rank)
                break
        else:
            return {rank: str(schedule.rows[rank][places[rank]]) for rank in sorted(left)}
    return {}


def one_ahead(schedule: Schedule) -> Starts:
    """The next receive of the row, before each computation."""
    found: dict[Action, list[Action]] = {}
    for row in schedule.rows:
        for before, receive in itertools.pairwise([one for one in row if one.kind in RECEIVES]):
            found[row[row.index(before) + 1]] = [receive]
    return found


def tables() -> list[tuple[str, int, int]]:
    sizes = [(2, 4), (2, 5), (2, 12), (3, 6), (3, 9), (4, 8), (4, 3), (8, 16)]
    return [(name, ranks, batches) for name in SCHEDULES for ranks, batches in sizes]


def table(name: str, ranks: int, batches: int, *, gathers: bool = False) -> Schedule:
    batches, stages = SCHEDULES[name].nearest(ranks, microbatches=batches, virtual_stages=SCHEDULES[name].virtual[0])
    return lower(planned_schedule(name, pp=ranks, microbatches=batches, virtual_stages=stages), gathers=gathers)


@pytest.mark.parametrize("name, ranks, batches", tables())
def test_no_rank_waits_for_ever(name: str, ranks: int, batches: int) -> None:
    for gathers in (False, True):
        schedule = table(name, ranks, batches, gathers=gathers)
        starts = receive_starts(schedule)
        assert not any(stuck(schedule, starts, seed=seed) for seed in range(2))
        assert_in_order_of_sends(schedule, starts)


def random_table(seed: int) -> Schedule:
    """A table that `validate` accepts: any placement of the stages, any order of what is ready, any B in two parts."""
    chances = random.Random(seed)
    ranks, batches = chances.randint(2, 5), chances.randint(1, 6)
    owner = [*range(ranks), *(chances.randrange(ranks) for _ in range(chances.randint(0, 2 * ranks)))]
    chances.shuffle(owner)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    last, urgent = len(owner) - 1, chances.choice([ActionKind.F, ActionKind.W, None])
    ready = [Action(0, ActionKind.F, index) for index in range(batches)]
    while ready:
        first = [action for action in ready if action.kind is urgent] or ready
        action = chances.choice(first if chances.random() < 0.8 else ready)
        ready.remove(action)
        rows[owner[action.stage]].append(action)
        stage, kind, index = action
        back = chances.choice([ActionKind.B, ActionKind.I])
        if kind is ActionKind.F:
            ready.append(Action(stage + 1, kind, index) if stage < last else Action(stage, back, index))
        elif kind is not ActionKind.W:
            ready += [Action(stage - 1, back, index)] if stage else []
            ready += [Action(stage, ActionKind.W, index)] if kind is ActionKind.I else []
    return Schedule(tuple(map(tuple, rows)))


@pytest.mark.parametrize("seed", range(60))
def test_no_rank_of_a_random_table_waits_for_ever(seed: int) -> None:
    table = random_table(seed)
    validate(table)
    lowered = lower(table, gathers=seed % 2 == 0)
    starts = receive_starts(lowered)
    assert not stuck(lowered, starts, seed=seed)
    assert_in_order_of_sends(lowered, starts)


def assert_in_order_of_sends(schedule: Schedule, starts: Starts) -> None:
    """NCCL has no tags: the receives from a rank start in the order of its sends."""
    for rank, row in enumerate(schedule.rows):
        begun = [one for action in row for one in (*starts.get(action, ()), action) if one.kind in RECEIVES]
        for source, sender in enumerate(schedule.rows):
            sent = [one.counterpart for one in sender if one.kind in SENDS]
            assert [one for one in dict.fromkeys(begun) if schedule.other_end(one) == source] == [
                one for one in sent if schedule.rank_of[one.stage] == rank
            ]


def test_a_receive_one_ahead_of_its_turn_can_wait_for_ever() -> None:
    """Rank 1 would wait, before it computes the first micro-batch, for the second, which follows its answer."""
    naive = table("naive", 2, 4)
    assert stuck(naive, one_ahead(naive), seed=0) == {0: "0RECV_B0", 1: "1F0"}


def test_a_receive_at_its_turn_can_wait_for_ever() -> None:
    """Each rank has sent, and computes before it receives what the other one has sent."""
    looped = table("looped", 2, 4)
    assert stuck(looped, {}, seed=0) == {0: "0F3", 1: "1F1"}


def test_receives_start_before_the_computations_that_they_overlap() -> None:
    """The last rank has its next micro-batch under way while it computes. The first one is idle until a gradient
    comes."""
    found = {name: receive_starts(table(name, 2, 4)) for name in ("1f1b", "zb-h1", "naive")}
    assert {name: {str(at): [*map(str, them)] for at, them in starts.items()} for name, starts in found.items()} == {
        "1f1b": {"1F0": ["1RECV_F1"], "1B1": ["1RECV_F2"], "1B2": ["1RECV_F3"]},
        "zb-h1": {"1F0": ["1RECV_F1"], "1I1": ["1RECV_F2"], "1F2": ["1RECV_F3"]},
        "naive": {},
    }


def test_a_table_that_deadlocks_is_refused() -> None:
    with pytest.raises(ScheduleError, match="deadlocks"):
        receive_starts(Schedule.parse("0RECV_B0 0F0 0SEND_F0 0B0 \n 1RECV_F0 1F0 1B0 1SEND_B0"))

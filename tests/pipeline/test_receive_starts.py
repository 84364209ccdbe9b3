"""`receive_starts`: no rank waits for ever, even where each computation waits for all messages of its rank."""

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from meshwise.pipeline.schedules.named_schedules import SCHEDULES, planned_schedule
from meshwise.pipeline.schedules.receive_starts import receive_starts
from meshwise.pipeline.schedules.schedule_table import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Schedule,
    ScheduleError,
    counterpart,
    lower,
)

Starts = Mapping[Action, Sequence[Action]]


def stuck(schedule: Schedule, starts: Starts, *, seed: int) -> dict[int, str]:
    """The action at which each rank waits for ever, by rank, if ranks go on by chance, and a computation begins when
    all sends and receives that its rank has started have their other ends."""
    chances, places, begun = random.Random(seed), [0] * schedule.ranks, set[Action]()
    own: list[set[Action]] = [set() for _ in schedule.rows]

    def begin(rank: int) -> None:
        """Start the messages of the rank's action."""
        action = schedule.rows[rank][places[rank]]
        own[rank].update(starts.get(action, ()), [action] if action.kind in SENDS | RECEIVES else ())
        begun.update(own[rank])

    def moves(rank: int) -> bool:
        action = schedule.rows[rank][places[rank]]
        if action.kind in COMPUTE:
            return all(counterpart(one) in begun for one in own[rank])
        return action.kind not in RECEIVES or counterpart(action) in begun

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
    sizes = [(2, 4), (2, 5), (3, 6), (4, 8), (4, 3), (8, 16)]
    return [(name, ranks, batches) for name in SCHEDULES for ranks, batches in sizes]


def table(name: str, ranks: int, batches: int, *, gathers: bool = False) -> Schedule:
    batches, stages = SCHEDULES[name].nearest(ranks, microbatches=batches, virtual_stages=SCHEDULES[name].virtual[0])
    return lower(planned_schedule(name, pp=ranks, microbatches=batches, virtual_stages=stages), gathers=gathers)


@pytest.mark.parametrize("name, ranks, batches", tables())
def test_no_rank_waits_for_ever(name: str, ranks: int, batches: int) -> None:
    schedule = table(name, ranks, batches, gathers=batches % 2 == 0)
    starts = receive_starts(schedule)
    for seed in range(3):
        assert not stuck(schedule, starts, seed=seed)
    for row in schedule.rows:
        order = [one for action in row for one in (*starts.get(action, ()), action) if one.kind in RECEIVES]
        first = list(dict.fromkeys(order))
        for kind in RECEIVES:
            for stage in {one.stage for one in row}:  # of one sender: in its order
                sent = [one for one in row if one.kind is kind and one.stage == stage]
                assert [one for one in first if one.kind is kind and one.stage == stage] == sent


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

"""Passes complete a table for a run, and `validate` finds its faults."""

import pytest

from meshwise.pipeline.schedules.named_schedules import SCHEDULES, make_schedule, planned_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.pipeline.schedules.schedule_table import (
    Schedule,
    ScheduleError,
    add_gathers,
    add_reductions,
    add_transfers,
    lower,
    merge_backward,
    peaks,
    send_first,
    validate,
    walk,
)


def table(text: str) -> Schedule:
    return Schedule.parse(text)


TWO = "0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1"


def test_sends_follow_what_they_send_and_receives_stand_before_what_needs_them() -> None:
    expected = """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """
    assert add_transfers(table(TWO)) == table(expected)


def test_the_gradient_of_a_split_backward_leaves_before_its_weights() -> None:
    split = add_transfers(table("0F0 0F1 0I0 0W0 0I1 0W1 \n 1F0 1I0 1W0 1F1 1I1 1W1"))
    assert "1I0 1SEND_B0 1W0" in str(split)


def test_a_rank_hands_over_to_its_own_next_stage_without_a_message() -> None:
    v = table("0F0 3F0 3B0 0B0 \n 1F0 2F0 2B0 1B0")
    expected = """
        0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0
        1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0
    """
    assert add_transfers(v) == table(expected)


def test_messages_are_received_in_the_order_of_the_sender() -> None:
    """Rank 1 wants micro-batch 1 first; rank 0 sends 0 first."""
    crossed = table("0F0 0F1 0B1 0B0 \n 1F1 1F0 1B1 1B0")
    assert "1RECV_F0 1RECV_F1 1F1 1F0" in str(add_transfers(crossed))
    validate(crossed)


def test_a_table_with_transfers_is_left_as_it_is() -> None:
    lowered = add_transfers(table(TWO))
    assert add_transfers(lowered) is lowered


def test_merging_undoes_splitting() -> None:
    assert merge_backward(table("0F0 0F1 0I0 0W0 0I1 0W1 \n 1F0 1I0 1W0 1F1 1I1 1W1")) == table(TWO)
    assert merge_backward(table("0F0 0F1 0I0 0I1 0W0 0W1")) == table("0F0 0F1 0I0 0I1 0W0 0W1")


def test_a_rank_without_forwards_left_sends_before_it_turns_to_the_weights() -> None:
    table_of = send_first(make_schedule("1f1b", pp=3, microbatches=4))
    expected = """
        0F0 0F1 0F2 0B0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1B0 1F2 1B1 1F3 1I2 1W2 1I3 1W3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2I3 2W3
    """
    assert table_of == table(expected)
    first, middle, last = str(lower(table_of, gathers=False)).splitlines()
    assert "I" not in first, "nobody waits for its gradients"
    assert middle.endswith("1RECV_B2 1I2 1SEND_B2 1W2 1RECV_B3 1I3 1SEND_B3 1W3 1REDUCE")
    assert last.endswith("2B2 2SEND_B2 2RECV_F3 2F3 2I3 2SEND_B3 2W3 2REDUCE")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped"])
@pytest.mark.parametrize("pp, microbatches", [(2, 2), (2, 8), (4, 4), (4, 8), (8, 16)])
def test_send_first_shortens_the_step_with_the_same_memory(name: str, pp: int, microbatches: int) -> None:
    whole = make_schedule(name, pp=pp, microbatches=microbatches)
    ours = planned_schedule(name, pp=pp, microbatches=microbatches)
    for cost in (ActionCost(1, 1, 1), ActionCost(1, 1.25, 0.75), ActionCost(2, 3, 1)):  # w is at most f
        before, after = (clock(lower(each, gathers=False), costs=cost).seconds for each in (whole, ours))
        assert before - after == pytest.approx((pp - 1) * cost.weight)
        assert peaks(ours) == peaks(whole)
    late = ActionCost(1, 1, 2)
    assert clock(ours, costs=late).seconds < clock(whole, costs=late).seconds
    validate(ours)


def test_naive_keeps_whole_backwards() -> None:
    assert planned_schedule("naive", pp=3, microbatches=2) == make_schedule("naive", pp=3, microbatches=2)


def test_gradients_are_reduced_once_after_the_last_micro_batch_of_a_stage() -> None:
    assert str(add_reductions(table("0F0 0F1 0I0 0I1 0W0 0W1"))) == "0F0 0F1 0I0 0I1 0W0 0W1 0REDUCE"
    assert str(add_reductions(table("0F0 1F0 1B0 0B0"))) == "0F0 1F0 1B0 1REDUCE 0B0 0REDUCE"


def test_a_neighbour_does_not_wait_for_a_reduction() -> None:
    assert str(lower(table("0F0 0B0 \n 1F0 1B0"), gathers=False)).endswith("1B0 1SEND_B0 1REDUCE")


def test_stages_are_gathered_one_computation_ahead_and_freed_after_their_last() -> None:
    gathered = add_gathers(table("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"))
    assert str(gathered) == "0GATHER 0F0 1GATHER 0F1 1F0 1F1 1B0 1B1 1FREE 0B0 0B1 0FREE"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("gathers", [False, True])
def test_what_a_run_needs_is_sound_for_every_schedule(name: str, *, gathers: bool) -> None:
    plain = make_schedule(name, pp=4, microbatches=8)
    lowered = lower(plain, gathers=gathers)
    done = [action for _, action in walk(lowered)]
    assert sorted(done) == sorted(set(lowered.actions())), "every action once, in an order without deadlock"
    assert peaks(lowered) == peaks(plain)


FAULTS = [
    ("0F0 0B0 0F0", "rank 0 does 0F0 twice"),
    ("0F0 0B0 1F0 \n 1B0", "stage 1 is on rank 0, but rank 1 does 1B0"),
    ("0F0 0B0 \n 2F0 2B0", "no rank does anything for stage 1"),
    ("0F0 0B0 0B1", "rank 0 has no 0F1"),
    ("0F0", "rank 0 has no backward for stage 0, micro-batch 0; give it 0B0, or 0I0 and 0W0"),
    ("0F0 0I0", "rank 0 has 0I0 for stage 0, micro-batch 0"),
    ("0F0 0B0 0W0", "rank 0 has 0B0 and 0W0"),
    ("0B0 0F0", "rank 0 does 0B0 before 0F0"),
    ("0F0 0W0 0I0", "rank 0 does 0W0 before 0I0"),
    ("1F0 0F0 1B0 0B0", "rank 0 does 1F0 before 0F0"),
    ("0F0 1F0 0B0 1B0", "rank 0 does 0B0 before 1B0 or 1I0"),
    # Rank 0 wants a gradient of micro-batch 0 before it sends micro-batch 1; rank 1 wants micro-batch 1 first.
    ("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1", "the schedule deadlocks: rank 0 in 0RECV_B0, rank 1 in 1RECV_F1 wait"),
]


@pytest.mark.parametrize("text, message", FAULTS)
def test_a_fault_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(table(text))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", SCHEDULES)
def test_lowering_delays_nothing(name: str) -> None:
    plain = make_schedule(name, pp=4, microbatches=8)
    assert clock(lower(plain, gathers=False)).seconds == clock(plain).seconds

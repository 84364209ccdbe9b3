"""Times, bubbles and memory of tables small enough to be worked out by hand."""

import pytest

from meshwise.base.step_timeline import Event, Timeline, TimelineRow
from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.pipeline.schedules.schedule_table import Schedule, ScheduleError, lower, peaks

TWO = Schedule.parse("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(event): (event.start, event.stop) for event in timeline.events}


def test_a_rank_waits_for_what_it_receives() -> None:
    timeline = clock(TWO)
    assert times(timeline)["0B0"] == (4, 6)
    assert times(timeline)["0RECV_B0"] == (2, 4)
    assert timeline.seconds == 9
    assert timeline.busy == (6, 6)
    assert timeline.idle == (3, 0)
    assert timeline.bubbles == pytest.approx((1 / 3, 1 / 3))


def test_a_link_delays_the_other_side_and_not_the_sender() -> None:
    at = times(clock(TWO, costs=[ActionCost(link=0.5), ActionCost()]))
    assert at["0F1"] == (1, 2)
    assert at["1F0"] == (1.5, 2.5)
    assert at["1SEND_B0"] == (4.5, 5)
    assert at["0B0"] == (5, 7)


def test_a_link_carries_one_message_after_the_other() -> None:
    at = times(clock(make_schedule("gpipe", pp=2, microbatches=2), costs=[ActionCost(link=3), ActionCost()]))
    assert (at["0SEND_F0"], at["0SEND_F1"]) == ((1, 4), (4, 7))
    assert at["1F1"] == (7, 8)


def test_stages_have_costs_of_their_own() -> None:
    at = times(clock(TWO, costs=[ActionCost(1, 1, 1), ActionCost(2, 3, 4)]))
    assert at["1F0"] == (1, 3)
    assert at["1B0"] == (3, 10)
    with pytest.raises(ScheduleError, match="3 costs for 2 stages"):
        clock(TWO, costs=[ActionCost()] * 3)


def test_gathers_and_reductions_overlap_computations() -> None:
    table = lower(Schedule.parse("0F0 1F0 1B0 0B0"), gathers=True)
    timeline = clock(table, costs=ActionCost(gather=2, reduce=5))
    at = times(timeline)
    assert str(table) == "0GATHER 1GATHER 0F0 1F0 1B0 1REDUCE 1FREE 0B0 0REDUCE 0FREE"
    assert (at["0GATHER"], at["1GATHER"]) == ((0, 2), (2, 4))
    assert (at["0F0"], at["1F0"]) == ((2, 3), (4, 5))
    assert (at["1REDUCE"], at["0REDUCE"]) == ((7, 12), (12, 17))
    assert at["0B0"] == (7, 9)
    assert timeline.seconds == 17


def test_peaks_count_activations_until_w() -> None:
    table = Schedule.parse("0F0 0I0 0F1 0I1 0W0 0W1")
    assert peaks(table) == (2,)


def test_events_come_with_their_rank() -> None:
    assert {event.rank for event in clock(TWO).events if event.stage == 1} == {1}
    assert clock(TWO).computing[1][-1] == Event(1, TimelineRow.COMPUTE, "B", 5, 7, stage=1, microbatch=1)
    assert clock(TWO).stages == ((0,), (1,))


def test_waits_inside_of_a_computation_are_not_computing() -> None:
    computed = [Event(0, TimelineRow.COMPUTE, "F", start, start + 4, 0, 0) for start in (0.0, 5.0)]
    waits = [Event(0, TimelineRow.WAIT, "all_gather", start, start + 1) for start in (1.0, 4.0, 8.0)]
    timeline = Timeline((*computed, *waits), ((0,),))
    assert timeline.busy == (6,)
    assert timeline.idle == (3,)

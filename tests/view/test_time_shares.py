"""Where a step goes: every second of a rank counts once."""

import pytest

from meshwise.base.step_timeline import Event, Timeline, TimelineRow, time_by_activity

COMPUTE, WAIT, LINK, COLLECTIVE = TimelineRow.COMPUTE, TimelineRow.WAIT, TimelineRow.LINK, TimelineRow.COLLECTIVE

#  0   1   2   3   4   5   6   7   8   9  10
#  begin   0F0 . tp. 0F0   recv    0B0   upd dp upd
STEP = Timeline(
    (
        Event(0, COLLECTIVE, "begin", 0, 1),
        Event(0, COMPUTE, "F", 1, 4, 0, 0),
        Event(0, WAIT, "tp", 2, 2.5),
        Event(0, COLLECTIVE, "all_reduce tp", 1.5, 2.5),
        Event(0, LINK, "SEND_F", 4, 5, 0, 0),
        Event(0, WAIT, "RECV_B", 4, 6, 0, 0),
        Event(0, WAIT, "recv", 4.5, 6),
        Event(0, COMPUTE, "B", 6, 8, 0, 0),
        Event(0, COLLECTIVE, "update", 8, 10),
        Event(0, WAIT, "dp", 8.5, 9.5),
        Event(1, COMPUTE, "F", 0, 2, 1, 0),
    ),
    ((0, 1),),
)


def test_waits_count_as_waits_also_within_a_computation_and_receives_as_bubble() -> None:
    assert time_by_activity(STEP)[0] == pytest.approx(
        {"around": 1, "computes": 4.5, "waits for tp": 0.5, "bubble": 2, "update": 1, "waits for dp": 1}
    )


def test_what_is_left_of_the_step_is_bubble() -> None:
    assert time_by_activity(STEP)[1] == pytest.approx({"computes": 2, "bubble": 8})

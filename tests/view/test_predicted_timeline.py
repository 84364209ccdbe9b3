"""A step of a simulation from begin to end: its timeline and its memory adds up to what was predicted."""

import dataclasses

import pytest

from meshwise.base.step_timeline import TimelineRow, time_by_activity
from meshwise.simulate.step_prediction import Prediction
from view.accounts import SHARDED, SPLIT, prediction

PLANS = [
    SPLIT,
    SHARDED,
    "pp=2 dp=4 zero=3 microbatches=4 schedule=zb-h1",
    "dp=8 zero=1 offload=optimizer:cpu",
    "pp=2 dp=4 zero=1 microbatches=4 offload=optimizer:cpu",
]


@pytest.fixture(scope="module", params=PLANS)
def made(request: pytest.FixtureRequest) -> Prediction:
    return prediction(request.param)


def test_the_timeline_is_as_long_as_the_step_and_every_second_of_it_goes_somewhere(made: Prediction) -> None:
    step = made.seconds
    assert made.timeline.seconds == pytest.approx(step, rel=1e-12)
    for own in time_by_activity(made.timeline):
        assert sum(own.values()) == pytest.approx(step, rel=1e-12)
        assert min(own.values()) >= 0
        assert own["computes"] > 0


def test_every_action_has_its_place_and_what_comes_before_and_after_the_schedule_too(made: Prediction) -> None:
    rehearsal = made.rehearsal
    for index in range(len(rehearsal.tapes)):
        own = [str(event) for event in made.timeline.events if event.rank == index]
        assert {str(action) for action in rehearsal.schedule.rows[index]} <= set(own)
        assert {"begin", "exchange", "update"} <= set(own)
    assert len(made.timeline.computing[0]) == 2 * rehearsal.plan.microbatches or "zb" in rehearsal.plan.schedule


def test_memory_over_time_begins_and_ends_with_what_rests_and_has_the_peak_between(made: Prediction) -> None:
    for index, memory in enumerate(made.memory):
        history = made.history(index)
        assert history.peak.bytes == max(moment.bytes for moment in memory.steady)
        assert history.levels[0].device == memory.rest
        assert history.levels[-1].bytes == pytest.approx(sum(memory.rest.values()), abs=64)  # with what is exchanged
        starts = [level.seconds for level in history.levels]
        assert starts == pytest.approx([step * history.seconds / len(starts) for step in range(len(starts))])


def test_a_moment_of_memory_is_in_the_action_that_its_rank_is_at_then(made: Prediction) -> None:
    peak = made.history(0).peak
    during = next(e for e in made.timeline.events if e.rank == 0 and str(e) == peak.during)
    part = made.seconds / 360
    assert during.start - part <= peak.seconds <= during.stop


def test_waits_too_many_to_be_seen_one_by_one_still_add_up(monkeypatch: pytest.MonkeyPatch, made: Prediction) -> None:
    monkeypatch.setattr("meshwise.simulate.step_prediction._MOST_EVENTS", 0)
    merged = dataclasses.replace(made).timeline
    for own, exact in zip(time_by_activity(merged), time_by_activity(made.timeline), strict=True):
        assert own == pytest.approx(exact, rel=1e-9, abs=1e-12)
    assert len([e for e in merged.events if e.row is TimelineRow.WAIT]) <= len(
        [e for e in made.timeline.events if e.row is TimelineRow.WAIT]
    )

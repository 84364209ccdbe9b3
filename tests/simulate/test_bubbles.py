"""Bubbles against the published formulas: equal stages, without time for messages."""

import dataclasses
from fractions import Fraction

import pytest

from meshwise.base.step_timeline import TimelineRow
from meshwise.engine.schedule_and_cut import plan_schedule
from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.plan import Plan
from meshwise.simulate.cluster import Link
from meshwise.simulate.rehearsal import rehearse
from meshwise.simulate.step_prediction import predict
from meshwise.view.drawing_data import predicted_account
from simulate.subjects import gpt_subject
from simulate.test_step_times import STEADY


def _bubble(plan: str) -> tuple[Fraction, Fraction, Plan]:
    """The time over that of the computations alone, less one: of the published table, and of the one that is run."""
    parsed = Plan.parse(plan)
    cost = ActionCost(*(one / parsed.virtual_stages for one in (1.0, 1.0, 1.0)))
    published = make_schedule(
        parsed.schedule, pp=parsed.pp, microbatches=parsed.microbatches, virtual_stages=parsed.virtual_stages
    )
    times = (clock(table, costs=cost).seconds for table in (published, plan_schedule(parsed)))
    one, other = (
        Fraction(round(seconds * parsed.virtual_stages), 3 * parsed.microbatches * parsed.virtual_stages) - 1
        for seconds in times
    )
    return one, other, parsed


@pytest.mark.parametrize("pp, microbatches", [(2, 4), (4, 4), (4, 8), (8, 32)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_gpipe_and_1f1b(schedule: str, pp: int, microbatches: int) -> None:
    # Narayanan et al., 2021, section 2.2: of the ideal time.
    published, run, plan = _bubble(f"pp={pp} microbatches={microbatches} schedule={schedule}")
    assert published == Fraction(plan.pp - 1, plan.microbatches)
    assert run == Fraction(2, 3) * published


@pytest.mark.parametrize("pp, microbatches, virtual", [(2, 4, 2), (4, 8, 2), (4, 8, 4), (8, 16, 2)])
def test_the_bubble_of_interleaved_stages(pp: int, microbatches: int, virtual: int) -> None:
    plan_text = f"pp={pp} microbatches={microbatches} schedule=interleaved virtual_stages={virtual}"
    published, run, plan = _bubble(plan_text)
    assert published == Fraction(plan.pp - 1, plan.virtual_stages * plan.microbatches)
    assert run == Fraction(2, 3) * published


@pytest.mark.parametrize("pp, microbatches", [(2, 4), (4, 8), (8, 24)])
def test_the_bubble_of_zb_h1_is_a_third_of_the_bubble_of_1f1b(pp: int, microbatches: int) -> None:
    published, run, plan = _bubble(f"pp={pp} microbatches={microbatches} schedule=zb-h1")
    assert published == run == Fraction(plan.pp - 1, 3 * plan.microbatches)


@pytest.mark.parametrize("plan", ["pp=2 dp=2 microbatches=2", "pp=2 dp=2 microbatches=2 zero=1 schedule=zb-h1"])
def test_the_bubble_does_not_count_waits_for_reductions(plan: str) -> None:
    """Over a slow link these are most of the step, and no more than all of it."""
    link = Link(bandwidth=((1.0, 1e6),), collectives={"send_recv": ((1.0, 1e30),)})
    slow = dataclasses.replace(STEADY, inside=link)
    prediction = predict(rehearse(gpt_subject(stages=2), plan=plan, ranks=4), cluster=slow)
    shares = {axes: seconds / prediction.seconds for axes, seconds in prediction.exposed.items()}
    assert shares["dp"] > 0.4
    assert prediction.bubble + sum(shares.values()) <= 1
    account = predicted_account(prediction)
    assert prediction.bubble == pytest.approx(account.timeline.spent["bubble"] / prediction.seconds, abs=0.05)


def test_a_prediction_counts_the_bubble_as_a_part_of_the_step() -> None:
    prediction = predict(rehearse(gpt_subject(stages=2), plan="pp=2 microbatches=4", ranks=2), cluster=STEADY)
    busy = sum(event.stop - event.start for event in prediction.timeline.events if event.row is TimelineRow.COMPUTE)
    assert prediction.bubble == pytest.approx(1 - busy / 2 / prediction.seconds)

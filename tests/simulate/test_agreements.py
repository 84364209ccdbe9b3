"""Test the predicted costs of replicas that agree across steps: bytes of a round, and seconds of its steps."""

from typing import Any

import pytest

from meshwise.comm.api.flight_recorder import bus_factor
from meshwise.comm.api.world import World
from meshwise.comm.in_process.thread_and_trace_worlds import run_threads
from meshwise.engine.parallelize import parallelize
from meshwise.plan import Plan
from meshwise.simulate.cluster import Cluster, Device, Link, MatmulEfficiency
from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from meshwise.simulate.step_prediction import Prediction, predict
from meshwise.view.drawing_data import predicted_account
from simulate.subjects import gpt_subject, loss

STREAMING: dict[str, Any] = {"fragments": 2, "delay": 1}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("dp=4 sync=diloco every=3", {}),
    ("dp=4 sync=diloco every=3", STREAMING),
    ("dp=4 sync=diloco every=3 wire=int8", {}),
    ("dp=4 sync=diloco every=3 wire=int4", STREAMING),
    ("dp=4 sync=local every=3", {"after": 2}),
    ("dp=4 sync=local every=4", {"group": 2, "group_every": 2}),
    ("dp=4 sync=local every=4", {"group": 2, "group_every": 3}),
    ("dp=2 sync=slowmo", {}),
    ("dp=2 sync=easgd every=2", {}),
    ("dp=4 sync=gossip every=2", {"graph": "exponential"}),
    ("dp=2 tp=2 sync=diloco every=3 wire=int8", {}),
    ("dp=2 pp=2 microbatches=2 sync=diloco every=2", {}),
]


def subject(settings: dict[str, Any], stages: int) -> RehearsalSubject:
    return gpt_subject(stages=stages, sync=settings)


def cluster(*, rate: float = 1e9, ranks_per_node: int = 4, overlap: bool = True) -> Cluster:
    """Where matrix products take time, and the bytes of links."""
    device = Device(
        kind="cpu", peak={"float32": 1e9}, products=MatmulEfficiency(best=1.0), attention=MatmulEfficiency(best=1.0)
    )
    between = Link(bandwidth=((1.0, rate),))
    inside = Link(bandwidth=((1.0, 1e30),))
    return Cluster(
        device=device, inside=inside, between=between, nodes=4, ranks_per_node=ranks_per_node, overlap=overlap
    )


def predicted(plan: str, settings: dict[str, Any], **links: Any) -> Prediction:
    parsed = Plan.parse(plan)
    rehearsal = rehearse(subject(settings, parsed.pp), plan=plan, ranks=parsed.mesh().size)
    return predict(rehearsal, cluster=cluster(**links))


def added_by_step(prediction: Prediction) -> list[float]:
    """Return the seconds that agreements add to each step of a round, by kind of step."""
    return [added for times, added in prediction.agreements for _ in range(times)]


def sent_in_a_round(world: World, plan: str, settings: dict[str, Any], steps: int) -> float:
    """The bytes that a rank sends along dp in the second of two rounds, without the count of losses of a step."""
    own = subject(settings, Plan.parse(plan).pp)
    trainer = parallelize(own.model, plan, loss=loss, world=world, options=own.options)
    for _ in range(steps):
        trainer.step(own.batch)
    with world.record() as records:
        for _ in range(steps):
            trainer.step(own.batch)
    sent = [record for record in records if "dp" in record.axes and record.kind != "recv"]
    return sum(record.bytes * bus_factor(record.kind, ranks=trainer.plan.dp or 1) for record in sent)


@pytest.mark.parametrize("plan, settings", CASES)
def test_a_round_sends_the_bytes_of_a_real_one(plan: str, settings: dict[str, Any]) -> None:
    prediction = predicted(plan, settings)
    real = run_threads(
        Plan.parse(plan).mesh().size, sent_in_a_round, args=(plan, settings, len(added_by_step(prediction)))
    )
    agreements = len(added_by_step(prediction)) // Plan.parse(plan).every
    names = 400 * agreements if "sync=local" in plan else 0  # of the optimizer's state, in bytes, which differ by rank
    assert sum(prediction.agreement_traffic.values()) == pytest.approx(max(real), rel=1e-9, abs=names)


def test_a_step_without_an_agreement_costs_what_it_costs_alone() -> None:
    agreeing = predicted("dp=4 sync=diloco every=50", {}, ranks_per_node=1)
    quarter = gpt_subject(rows=4)
    alone = predict(rehearse(quarter, plan="dp=1", ranks=1), cluster=cluster())
    assert agreeing.seconds == pytest.approx(alone.seconds, rel=1e-6)
    assert [(times, added > 0) for times, added in agreeing.agreements] == [(49, False), (1, True)]


@pytest.mark.parametrize("wire", ["auto", "int8"])
def test_a_blocked_agreement_adds_its_bytes_over_the_link(wire: str) -> None:
    prediction = predicted(f"dp=4 sync=diloco every=5 wire={wire}", {}, rate=1e6, ranks_per_node=1)
    sent = prediction.agreement_traffic["between"]
    assert prediction.agreement_traffic["inside"] == 0
    assert added_by_step(prediction) == pytest.approx([0, 0, 0, 0, sent / 1e6], rel=1e-6)
    assert prediction.mean_seconds == pytest.approx(prediction.seconds + sent / 5e6)
    assert prediction.tokens_per_second == pytest.approx(prediction.rehearsal.tokens / prediction.mean_seconds)


@pytest.mark.parametrize("steps_of_link, waited", [(0.5, 0.0), (1.5, 0.0), (2.75, 0.75)])
def test_a_delay_hides_what_the_link_takes_less(steps_of_link: float, waited: float) -> None:
    """An exchange may take two steps; the link takes this many steps."""
    plan, settings = "dp=4 sync=diloco every=5", {"delay": 2}
    free = predicted(plan, settings, rate=1e30, ranks_per_node=1)
    rate = free.agreement_traffic["between"] / (steps_of_link * free.seconds)
    found = predicted(plan, settings, rate=rate, ranks_per_node=1)
    assert added_by_step(found) == pytest.approx([0, 0, 0, 0, waited * free.seconds], rel=1e-6, abs=1e-12)
    blocked = predicted(plan, settings, rate=rate, ranks_per_node=1, overlap=False)
    assert sum(added_by_step(blocked)) == pytest.approx(steps_of_link * free.seconds, rel=1e-6)


def test_a_round_of_a_million_steps_is_rehearsed_by_the_kinds_of_its_steps() -> None:
    settings = {"group": 2, "group_every": 999}
    found = predicted("dp=4 sync=local every=1000", settings, rate=1e6, ranks_per_node=1)
    few = predicted("dp=4 sync=local every=4", {"group": 2, "group_every": 3}, rate=1e6, ranks_per_node=1)
    [quiet, of_groups, of_all] = [added for _, added in few.agreements]
    assert [times for times, _ in few.agreements] == [6, 3, 3]
    assert [times for times, _ in found.agreements] == [999000 - 999 - 999, 999, 999]
    assert [added for _, added in found.agreements] == pytest.approx([quiet, of_groups, of_all], rel=1e-5)
    assert found.mean_seconds == pytest.approx(found.seconds + (of_groups + of_all) / 1000, rel=1e-9)
    assert len(found.rehearsal.tapes[0].agreements) == 6


def test_neighbours_of_gossip_use_the_links_between_their_nodes() -> None:
    near, far = (predicted("dp=4 sync=gossip", {"graph": graph}, rate=1e6, ranks_per_node=2) for graph in GRAPHS)
    assert near.agreement_traffic["between"] == 0
    assert added_by_step(near) == pytest.approx([0.0], abs=1e-9)
    assert added_by_step(far) == pytest.approx([0.0, far.agreement_traffic["between"] / 1e6], rel=0.01, abs=1e-9)


GRAPHS = ("groups:2", "exponential")


def test_the_table_of_a_prediction_shows_its_rounds() -> None:
    facts = predicted_account(predicted("dp=4 sync=diloco every=5", {}, rate=1e6, ranks_per_node=1)).facts
    assert {"mean of 5 steps", "longest step", "a round sends between"} <= facts.keys()
    assert facts["a round sends between"].endswith("a step)")
    assert "longest step" not in predicted_account(predicted("dp=4", {})).facts

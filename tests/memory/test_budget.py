"""A budget of activations: which blocks are recomputed to meet it, and how that is explained."""

import pytest

from memory.repeated import Model, batches, loss, on
from meshwise.comm.thread_world import run_threads
from meshwise.comm.world import World
from meshwise.memory.cost import Cost, pick
from meshwise.parallelize import Options, parallelize
from meshwise.plan import Plan, PlanError


def cost(none: int, selective: int, full: int, *seconds: float, in_flight: float = 1) -> Cost:
    times = dict(zip(("none", "selective", "full"), (0.0, *seconds), strict=True))
    return Cost({"none": none, "selective": selective, "full": full}, times, in_flight)


@pytest.mark.parametrize(
    "budget, modes",
    [
        (30, "full full full"),
        (39, "full full full"),
        (49, "full full none"),
        (50, "full selective full"),  # 4 seconds for 20 bytes, where b.none is 5 for 90 and c.none 1 for 10
        (60, "full selective none"),
        (130, "full none none"),
        (400, "none none none"),
    ],
)
def test_a_budget_buys_the_most_seconds_a_byte(budget: int, modes: str) -> None:
    costs = {"a": cost(210, 150, 10, 1.0, 2.0), "b": cost(100, 30, 10, 1.0, 5.0), "c": cost(20, 20, 10, 1.0, 1.0)}
    assert " ".join(pick(costs, budget=budget, allowed=("none", "selective", "full")).values()) == modes


def test_micro_batches_in_flight_count() -> None:
    costs = {"a": cost(100, 50, 10, 1.0, 2.0, in_flight=3)}
    assert pick(costs, budget=299, allowed=("none", "full")) == {"a": "full"}
    assert pick(costs, budget=300, allowed=("none", "full")) == {"a": "none"}
    with pytest.raises(PlanError, match="with all 1 blocks of this rank recomputed they keep 30 bytes"):
        pick(costs, budget=29, allowed=("none", "full"))


def test_a_budget_is_met_and_explained() -> None:
    def run(world: World, plan: str) -> tuple[dict[str, str], dict[str, Cost], str]:
        trainer = parallelize(Model, plan, loss=loss, world=world, lr=1e-2, options=Options(example=batches()[0]))
        before = dict(trainer.blocks.modes)
        assert set(before.values()) == {"full"}
        for batch in batches():
            trainer.step(batch)
        return dict(trainer.blocks.modes), dict(trainer.blocks.costs), trainer.blocks.table()

    for budget, plan in ((24, "dp=1"), (48, "dp=1"), (24, "dp=2 tp=2"), (24, "pp=2 microbatches=4")):
        for modes, costs, table in run_threads(Plan.parse(plan).mesh().size, run, args=(f"{plan} budget={budget}K",)):
            held = sum(costs[name].held(mode) for name, mode in modes.items())
            assert held <= budget * 1024
            assert set(costs) == set(modes) >= {next(iter(modes))}
            assert all(cost.bytes["none"] > cost.bytes["selective"] > cost.bytes["full"] for cost in costs.values())
            assert all(name in table and modes[name] in table for name in modes)


def test_a_budget_that_cannot_be_met_is_refused_with_one_that_can() -> None:
    with pytest.raises(PlanError, match="Nearest that works: 'budget=1M'"):
        on("dp=1 budget=1K")

"""A budget of activations is met by recomputing blocks, and a table shows which."""

import pytest

from memory.recomputed_model import batches, on, under
from meshwise.comm.api.world import World
from meshwise.memory.activation_policy import MEASURED_STEPS
from meshwise.memory.recompute_costs import RecomputeCost, choose_modes
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import PlanError


def cost(none: int, selective: int, full: int, *seconds: float, in_flight: float = 1) -> RecomputeCost:
    times = dict(zip(("none", "selective", "full"), (0.0, *seconds), strict=True))
    return RecomputeCost({"none": none, "selective": selective, "full": full}, times, in_flight)


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
    assert " ".join(choose_modes(costs, budget=budget, allowed=("none", "selective", "full")).values()) == modes


def test_micro_batches_in_flight_count() -> None:
    costs = {"a": cost(100, 50, 10, 1.0, 2.0, in_flight=3)}
    assert choose_modes(costs, budget=299, allowed=("none", "full")) == {"a": "full"}
    assert choose_modes(costs, budget=300, allowed=("none", "full")) == {"a": "none"}
    with pytest.raises(PlanError, match="with all 1 blocks of this rank recomputed, 30 bytes are kept"):
        choose_modes(costs, budget=29, allowed=("none", "full"))


def test_a_budget_is_met_and_explained() -> None:
    def run(world: World, plan: str) -> tuple[dict[str, str], dict[str, RecomputeCost], str]:
        trainer = under(world, plan)
        before = dict(trainer.blocks.modes)
        assert set(before.values()) == {"full"}
        for batch in batches()[:MEASURED_STEPS]:
            trainer.step(batch)
        return dict(trainer.blocks.modes), dict(trainer.blocks.costs), trainer.blocks.table()

    for budget, plan in ((24, "dp=1"), (48, "dp=1"), (24, "dp=2 tp=2"), (24, "pp=2 microbatches=4")):
        for modes, costs, table in on(f"{plan} budget={budget}K", run):
            kept = sum(costs[name].kept(mode) for name, mode in modes.items())
            assert kept <= budget * 1024
            assert set(costs) == set(modes) >= {next(iter(modes))}
            assert all(cost.bytes["none"] > cost.bytes["selective"] > cost.bytes["full"] for cost in costs.values())
            assert all(name in table and modes[name] in table for name in modes)


def test_halves_of_a_block_are_measured_and_chosen_each_for_itself() -> None:
    """Also the half that a stage leaves in its midst, and where both are on one rank."""

    def run(world: World, plan: str) -> tuple[dict[str, str], dict[str, RecomputeCost]]:
        cut = CutOptions(at=("layers.0", "layers.0.second", "layers.1.second"))
        trainer = under(world, plan, cut=cut)
        for batch in batches()[:MEASURED_STEPS]:
            trainer.step(batch)
        return dict(trainer.blocks.modes), dict(trainer.blocks.costs)

    plan = "pp=2 microbatches=4 virtual_stages=2 schedule=zb-v partition=params budget=1G"
    for rank, (modes, costs) in enumerate(on(plan, run)):
        assert modes.keys() == costs.keys()
        assert (
            set(modes)
            == [
                {"layers.1 of stage 3"},
                {"layers.0 of stage 1", "layers.0 of stage 2", "layers.1 of stage 2"},
            ][rank]
        )
        assert set(modes.values()) == {"none"}
        assert all(cost.bytes["none"] > cost.bytes["full"] for cost in costs.values())


def test_a_budget_that_cannot_be_met_is_refused_with_one_that_can() -> None:
    def run(world: World, plan: str) -> None:
        trainer = under(world, plan, layers=1)
        for batch in batches():
            trainer.step(batch)

    with pytest.raises(PlanError, match="Nearest that works: 'budget=1M'"):
        on("dp=1 budget=1K", run)

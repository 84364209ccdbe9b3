"""Test `dp=4x8`: state is sharded among neighbours, and the groups hold replicas whose gradients are added once a step.

Every plan gives the numbers of one process to 1e-9, also with tp, cp, pp, offload, whole-parameter
optimizers and open steps. The bytes of a step equal the formula in `data_parallel_engine.py`."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from data_parallel.test_agreement import BOUND, TRAINING, Case, batches, check
from data_parallel.test_collective_counts import TOTALS, counted, sizes
from grid import Grid
from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.optim import LAMB, Muon, Several
from meshwise.plan import Plan
from meshwise.reference import next_token_loss
from meshwise.testing import agree, run

GRID = Grid(
    {
        "dp": ("2x2", "1x3", "3x1", "2x1", "3x2"),
        "zero": (1, 2, 3),
        "microbatches": (1, 3),
        "tied": (False, True),
        "frozen": (False, True),
    },
    cost=lambda cell: 2.0 if cell["dp"] == "3x2" else 1.0,
    heavy=lambda cell: cell["dp"] == "3x2" and cell["zero"] < 3,  # two groups of two have the others
    single=("tied", "frozen", "microbatches"),
)


@pytest.mark.grid(GRID)
def test_a_plan_is_one_process(dp: str, zero: int, microbatches: int, tied: bool, frozen: bool) -> None:
    check(f"dp={dp} zero={zero} microbatches={microbatches}", Case(tied, frozen), every=False)


def trained(world: World, plan: str, options: Options, case: Case) -> Any:
    trainer = parallelize(case.model(), plan, world=world, **{**TRAINING, "options": options})
    steps = outcome(trainer, batches=batches())
    trainer.close()
    return steps


OTHERS = (
    "dp=2x2 zero=3 tp=2",
    "dp=2x1 zero=2 cp=2",
    "dp=2x2 zero=1 pp=2 microbatches=2",
    "dp=2x2 zero=3 pp=2 microbatches=3",
    "dp=2x2 zero=3 offload=params:disk,optimizer:disk microbatches=3",
    "dp=2x2 zero=1 offload=optimizer:cpu,gradients:disk",
)


# Mixtures of experts have groups under tp and in stages, in tests/expert/test_hybrid_experts.py.
@pytest.mark.grid(Grid({"plan": OTHERS}, heavy=lambda cell: "tp=" in cell["plan"] or "pp=" in cell["plan"]))
def test_it_goes_with_the_other_axes_and_with_offload(plan: str, tmp_path: Path) -> None:
    options = dataclasses.replace(TRAINING["options"], example=batches()[0])
    options = dataclasses.replace(options, swap=dataclasses.replace(options.swap, folder=tmp_path))
    case = Case(tied=True)
    whole = alone(case.model(), batches=batches(), **TRAINING)
    for steps in run(Plan.parse(plan).mesh().size, trained, args=(plan, options, case)):
        agree(steps, whole, bound=BOUND)


@pytest.mark.grid(Grid({"plan": ("dp=2x2 zero=1", "dp=2x2 zero=3")}, heavy=lambda cell: "zero=1" in cell["plan"]))
def test_optimizers_of_norms_and_whole_parameters_count_each_element_once(plan: str) -> None:
    optimizers = {"hidden": (Muon, {"lr": 0.02}), "rest": (LAMB, {"lr": 0.01})}
    arguments: dict[str, Any] = {"loss": next_token_loss, "optimizer": Several, "optimizers": optimizers}

    def main(world: World) -> Any:
        return outcome(parallelize(Case().model(), plan, world=world, **arguments), batches=batches())

    whole = alone(Case().model(), batches=batches(), **arguments)
    for steps in run(4, main):
        agree(steps, whole, bound=BOUND)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_open_step_without_a_last_backward_adds_the_replicas(zero: int) -> None:
    def main(world: World, plan: str) -> tuple[float, dict[str, torch.Tensor]]:
        trainer = parallelize(Case().model(), plan, world=world, lr=1e-2)
        with trainer.open_step() as step:
            for half in (slice(0, 6), slice(6, 12)):
                inputs, targets = step.rows(tuple(each[half] for each in batches()[0]))
                loss_sum, count = next_token_loss(step.forward(inputs), (inputs, targets))
                step.backward(step.mean(loss_sum, count))
            norm = step.update().grad_norm
        return norm, {name: value.clone() for name, value in trainer.full_parameters()}

    whole = run(1, main, args=("dp=1",))[0]
    for found in run(4, main, args=(f"dp=2x2 zero={zero}",)):
        agree(found, whole, bound=BOUND)


COUNTS = Grid(
    {"zero": (1, 2, 3), "replicas": (2, 3), "m": (1, 3), "frozen": (False, True)},
    cost=lambda cell: cell["replicas"] * cell["m"],
    strength=1,
)


@pytest.mark.grid(COUNTS)
def test_a_step_calls_what_the_formula_says(zero: int, replicas: int, m: int, frozen: bool) -> None:
    plan = Plan(dp=replicas * 2, shards=2, zero=zero, microbatches=m)
    counts, table, together = run(replicas * 2, counted, args=(plan, frozen))[0]
    own, others = (sizes(table, trained=which, ranks=2) for which in (True, False))
    (p, u), (f, v) = (sum(own), len(own)), (sum(others), len(others))
    rounds = m if zero > 1 else 1
    gathers = (m * (2 * (u + v) - 1), m * (2 * (p + f) - own[-1])) if zero == 3 and not together else (u, p)
    counts.check(
        {
            "all_reduce[dp_outer·dp_shard]": TOTALS,
            "reduce_scatter[dp_shard]": (rounds * u, rounds * p),
            "all_reduce[dp_outer]": (u, p // 2),
            "all_gather[dp_shard]": gathers,
        }
    )


RESHARDED = (
    ("dp=2x2 zero=3", "dp=3 zero=1"),
    ("dp=2 zero=2", "dp=2x2 zero=1"),
    ("dp=2x2 zero=1", "dp=1x4 zero=3"),
)


@pytest.mark.grid(Grid({"plans": RESHARDED}, heavy=lambda cell: cell["plans"] == RESHARDED[2]))
def test_a_checkpoint_loads_under_another_division(plans: tuple[str, str], tmp_path: Path) -> None:
    before, after = plans

    def first(world: World) -> None:
        trainer = parallelize(Case().model(), before, world=world, **TRAINING)
        outcome(trainer, batches=batches()[:2])
        trainer.save(tmp_path / "saved")

    def second(world: World) -> Any:
        trainer = parallelize(Case().model(), after, world=world, **TRAINING)
        trainer.load(tmp_path / "saved")
        return outcome(trainer, batches=batches()[2:])

    run(Plan.parse(before).mesh().size, first)
    whole = alone(Case().model(), batches=batches(), **TRAINING)
    for steps in run(Plan.parse(after).mesh().size, second):
        agree(steps[0], whole[2], bound=BOUND)

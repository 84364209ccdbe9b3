"""The numbers bar with stages, over everything that they are combined with: two steps of AdamW with clipping, in
float64, the loss and norm of every step and every parameter to 1e-9 of one process.

    schedule × pp × model × zero × tp × dp

The rows of a batch are one fewer than divide evenly, so that the last replica lacks its last micro-batch. The whole
product is run by `make grid`; `make test` runs cells of it that have each pair of values."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from grid import Cell, Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.testing import agree, alone, run
from pipeline.subjects import SUBJECTS
from warm_processes import Processes

BOUND = 1e-9
STEPS = 2
VIRTUAL = {"interleaved": 2, "looped": 2, "zb-v": 2, "dualpipev": 2}
SPLIT = {"1": "tp=1", "2": "tp=2", "2-tokens": "tp=2 sequence_parallel=1"}


def exists(cell: Cell) -> bool:
    """Images have no tokens to split, and T5's attention cannot be given a part of them, with stages or without."""
    return cell["tp"] != "2-tokens" or cell["model"] not in ("resnet", "t5")


@functools.cache
def plan_of(schedule: str, pp: int, zero: int, tp: str, dp: int) -> Plan:
    virtual = VIRTUAL.get(schedule, 1)
    microbatches = 2 * pp if schedule in ("zb-v", "dualpipev") else pp
    words = f"pp={pp} dp={dp} zero={zero} {SPLIT[tp]} schedule={schedule} virtual_stages={virtual}"
    return Plan.parse(f"{words} microbatches={microbatches} partition=params")


def cost(cell: Cell) -> float:
    """Ranks, and what each of them runs; by the root, a dear cell that has many pairs is worth it."""
    plan, model = plan_of(cell["schedule"], cell["pp"], 0, cell["tp"], cell["dp"]), 3 if cell["model"] == "t5" else 1
    return math.sqrt(plan.mesh().size * (5 + plan.microbatches * plan.virtual_stages) * model)


GRID = Grid(
    {
        "schedule": ("naive", "gpipe", "1f1b", "interleaved", "looped", "zb-h1", "zb-h2", "zb-v", "dualpipev"),
        "pp": (2, 4),
        "model": ("gpt", "tied", "resnet", "llama", "t5"),
        "zero": (0, 1, 2, 3),
        "tp": tuple(SPLIT),
        "dp": (1, 2),
    },
    exists=exists,
    cost=cost,
    single=("zero", "model", "tp"),
    heavy=lambda cell: plan_of(cell["schedule"], cell["pp"], 0, cell["tp"], cell["dp"]).mesh().size > 4,
)


def training(model: str, rows: int) -> dict[str, Any]:
    subject = SUBJECTS[model]
    options = Options(
        clip_norm=0.5,
        forward=subject.forward,
        example=subject.batch(rows),
        cut=subject.where,
        tensor_rules=subject.rules,
    )
    return {"loss": subject.loss, "options": options, "lr": 1e-2, "weight_decay": 0.1}


@functools.cache
def existing(model: str, stages: int) -> nn.Module:
    torch.manual_seed(1)
    return SUBJECTS[model].build(stages)


def given(model: str, stages: int) -> nn.Module | Callable[[], nn.Module]:
    subject = SUBJECTS[model]
    return functools.partial(subject.build, stages) if subject.deferred else copy.deepcopy(existing(model, stages))


@functools.cache
def expected(model: str, stages: int, rows: int) -> Any:
    batches = [SUBJECTS[model].batch(rows)] * STEPS
    steps = alone(given(model, stages), batches=batches, **training(model, rows))
    numbers = [(step["loss"], step["grad_norm"]) for step in steps]
    return {"numbers": numbers, "parameters": steps[-1]["parameters"]}


def trained(world: World, plan: Plan, model: str, stages: int, rows: int) -> Any:
    trainer = parallelize(given(model, stages), plan, world=world, **training(model, rows))
    results = [trainer.step(SUBJECTS[model].batch(rows)) for _ in range(STEPS)]
    parameters = {name: value.clone() for name, value in trainer.full_parameters()}
    trainer.close()
    return {"numbers": [(result.loss, result.grad_norm) for result in results], "parameters": parameters}


def check(plan: Plan, model: str, on: Any = "threads") -> None:
    stages = plan.pp * plan.virtual_stages
    rows = plan.microbatches * (plan.dp or 1) - 1
    whole = expected(model, stages, rows)
    for found in run(plan.mesh().size, trained, on=on, args=(plan, model, stages, rows)):
        agree(found, whole, bound=BOUND)


@pytest.mark.grid(GRID)
def test_a_pipeline_is_one_process(schedule: str, pp: int, model: str, zero: int, tp: str, dp: int) -> None:
    check(plan_of(schedule, pp, zero, tp, dp), model)


@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    [
        ("gpipe", 2, "resnet", 2, "1", 2),
        ("1f1b", 4, "tied", 0, "1", 1),
        ("interleaved", 2, "gpt", 3, "1", 2),
        ("zb-h1", 2, "gpt", 1, "2-tokens", 1),
        ("zb-h2", 2, "tied", 3, "1", 2),
        ("dualpipev", 2, "gpt", 1, "1", 2),
    ],
    ids=lambda case: " ".join(map(str, case)),
)
def test_on_processes(case: tuple[str, int, str, int, str, int], processes: Processes) -> None:
    schedule, pp, model, zero, tp, dp = case
    check(plan_of(schedule, pp, zero, tp, dp), model, on=processes)

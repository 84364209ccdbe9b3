"""Test that every plan gives the numbers of one process to 1e-9.

Three steps of AdamW with clipping, in float64. Loss, gradient norm, every gradient and every parameter are compared
after every step, on every rank, over the grid

    zero 0 1 2 3  ×  dp 1 2 3 4  ×  micro-batches 1 3  ×  untied, tied  ×  all trained, some frozen

with batches of uneven sizes:

    step 0    12 rows: every plan of the grid divides them
    step 1     7 rows: most plans do not divide them; some targets do not count, and one row has only such targets
    step 2     2 rows: fewer than the ranks of some plans, and more micro-batches than rows on any rank

A model whose parameters are all trained is built under the plan. A model with frozen parts is passed as a module with
its values."""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import last_outcome
from grid import Grid
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.reference.gpt import IGNORED
from meshwise.testing import agree, alone, outcome, run
from warm_processes import Processes

BOUND = 1e-9
VOCABULARY, CONTEXT = 16, 4
ROWS = (12, 7, 2)
TRAINING: Mapping[str, Any] = {
    "loss": next_token_loss,
    "options": Options(clip_norm=0.5),
    "lr": 1e-2,
    "weight_decay": 0.1,
}


@dataclass(frozen=True)
class Case:
    """A GPT; picklable, so that it can go to a process."""

    tied: bool = False
    frozen: bool = False

    def model(self) -> nn.Module | Callable[[], nn.Module]:
        return copy.deepcopy(existing(self)) if self.frozen else self.build

    def build(self) -> nn.Module:
        shape = GPTConfig(
            vocabulary=VOCABULARY, context=CONTEXT, layers=2, heads=2, width=8, mlp_ratio=2, tied=self.tied, bias=True
        )
        model = GPT(shape).double()
        if self.frozen:
            model.get_submodule("positions").requires_grad_(False)
            model.get_submodule("blocks.0.mlp").requires_grad_(False)
        return model


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for rows in ROWS:
        tokens = torch.randint(VOCABULARY, (rows, CONTEXT + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        if rows == 7:
            targets[0, : CONTEXT - 1] = IGNORED
            targets[5] = IGNORED
        drawn.append((tokens[:, :-1], targets))
    return drawn


@functools.cache
def existing(case: Case) -> nn.Module:
    torch.manual_seed(5)
    return case.build()


@functools.cache
def expected(case: Case, every: bool = True) -> Any:
    return (alone if every else last_outcome.alone)(case.model(), batches=batches(), **TRAINING)


def parallel(world: World, plan: str, case: Case, every: bool) -> Any:
    trainer = parallelize(case.model(), plan, world=world, **TRAINING)
    steps = (outcome if every else last_outcome.outcome)(trainer, batches=batches())
    trainer.close()
    return steps


def check(plan: str, case: Case, on: Any = "threads", *, every: bool = True) -> None:
    """Compare with one process; without `every`, gradients and parameters after the last step alone."""
    whole = expected(case, every)
    size = Plan.parse(plan).mesh().size
    for steps in run(size, parallel, on=on, args=(plan, case, every)):
        agree(steps, whole, bound=BOUND)


GRID = Grid(
    {
        "zero": (0, 1, 2, 3),
        "dp": (1, 2, 3, 4),
        "microbatches": (1, 3),
        "tied": (False, True),
        "frozen": (False, True),
    },
    cost=lambda cell: cell["dp"],
)


@pytest.mark.grid(GRID)
def test_a_plan_is_one_process(zero: int, dp: int, microbatches: int, tied: bool, frozen: bool) -> None:
    check(f"dp={dp} zero={zero} microbatches={microbatches}", Case(tied, frozen))


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan, case",
    [
        ("dp=4", Case(tied=True)),
        ("dp=4 microbatches=3", Case(frozen=True)),
        ("dp=4 zero=1", Case(tied=True, frozen=True)),
        ("dp=4 zero=2 microbatches=3", Case()),
        ("dp=4 zero=3", Case(tied=True)),
        ("dp=4 zero=3 microbatches=3", Case(tied=True, frozen=True)),
    ],
)
def test_real_processes_are_one_process(plan: str, case: Case, processes: Processes) -> None:
    check(plan, case, processes)

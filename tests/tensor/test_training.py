"""Training under tp is the training of one process: three steps of AdamW with clipping, float64, to 1e-9.

`test_grid` has the product of schemes, models and ZeRO; here are sizes and batches that do not divide, micro-batches,
models that are initialized under the plan, and processes. The batch of step 1 has fewer rows than some plans have ranks
to give them to."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid, ranks_of
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, alone, count, run
from warm_processes import Processes

TRAINING: dict[str, Any] = {"loss": next_token_loss, "options": Options(clip_norm=0.5), "lr": 1e-2, "weight_decay": 0.1}

CASES = (
    ("tp=3 sequence_parallel=1", "untied"),
    ("dp=2 tp=3 microbatches=2 zero=2", "tied"),
    ("tp=4 tp_mode=2d microbatches=2 zero=2", "untied"),
    ("tp=8 tp_mode=3d zero=1", "untied"),
)


@dataclass(frozen=True)
class Case:
    """A GPT whose sizes do not divide; picklable, so that it can go to a process."""

    tied: bool

    def build(self) -> nn.Module:
        shape = GPTConfig(
            vocabulary=19, context=5, layers=2, heads=3, width=9, mlp_ratio=1.6, tied=self.tied, bias=True
        )
        return GPT(shape).double()


@functools.cache
def existing(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return case.build()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for rows in (8, 3, 7):
        tokens = torch.randint(19, (rows, 6), generator=generator)
        drawn.append((tokens[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] == 4, -100)))
    return drawn


def single(model: nn.Module | Callable[[], nn.Module]) -> Any:
    """The numbers of every step of one process, and the gradients and parameters of the last."""
    steps = alone(copy.deepcopy(model), batches=batches(), **TRAINING)
    numbers = [(step["loss"], step["grad_norm"], step["tokens"]) for step in steps]
    return numbers, steps[-1]["gradients"], steps[-1]["parameters"]


@functools.cache
def expected(case: Case) -> Any:
    return single(existing(case))


def trained(world: World, plan: str, model: nn.Module | Callable[[], nn.Module]) -> Any:
    trainer = parallelize(copy.deepcopy(model), plan, world=world, **TRAINING)
    numbers = [(step.loss, step.grad_norm, step.tokens) for step in map(trainer.step, batches())]
    gradients, parameters = (
        {name: tensor.clone() for name, tensor in named}
        for named in (trainer.full_gradients(), trainer.full_parameters())
    )
    return numbers, gradients, parameters


@pytest.mark.grid(Grid({"case": CASES}, heavy=lambda cell: ranks_of(cell["case"][0]) > 6))
def test_a_split_model_trains_as_on_one_process(case: tuple[str, str]) -> None:
    plan, ties = case
    named = Case(tied=ties == "tied")
    for steps in run(Plan.parse(plan).mesh().size, trained, args=(plan, existing(named))):
        agree(steps, expected(named), bound=1e-9)


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["tp=2 sequence_parallel=1", "tp=4 tp_mode=2d zero=3", "dp=2 tp=2 zero=1"])
def test_processes_train_as_one(processes: Processes, plan: str) -> None:
    case = Case(tied=True)
    for steps in run(Plan.parse(plan).mesh().size, trained, args=(plan, existing(case)), on=processes):
        agree(steps, expected(case), bound=1e-9)


@pytest.mark.parametrize("plan", ["tp=2", "tp=4 tp_mode=2d"])
def test_a_model_initialized_under_the_plan_is_the_same_model(plan: str) -> None:
    build = Case(tied=False).build
    for steps in run(Plan.parse(plan).mesh().size, trained, args=(plan, build)):
        agree(steps, single(build), bound=1e-9)


def traffic_of_tp(world: World, plan: str, model: nn.Module) -> dict[str, tuple[int, int]]:
    trainer = parallelize(copy.deepcopy(model), plan, world=world, **TRAINING)
    with world.record() as records:
        trainer.step(batches()[0])
    return {name: row for name, row in count(records).items() if name.endswith("[tp]")}


def test_zero_3_does_not_gather_split_logits() -> None:
    model = existing(Case(tied=False))
    plain, spread = (run(4, traffic_of_tp, args=(f"dp=2 tp=2 zero={zero}", model)) for zero in (2, 3))
    assert "all_reduce[tp]" in plain[0]
    assert spread == plain


class Reluctant(GPT):
    """Cannot be run without rows, as many models cannot."""

    def forward(self, tokens: Tensor) -> Tensor:
        assert len(tokens), "no rows"
        return super().forward(tokens)


def test_ranks_without_rows_run_a_row_of_another_rank() -> None:
    """As `meshwise train` does where a validation ends with one row."""
    model = existing(Case(tied=False))
    assert isinstance(model, GPT)
    tokens, targets = (part[:1] for part in batches()[0])
    settings: dict[str, Any] = {"loss": next_token_loss, "lr": 1e-2}

    def main(world: World) -> tuple[float, float]:
        own = copy.deepcopy(model)
        own.__class__ = Reluctant
        trainer = parallelize(own, "tp=4 tp_mode=2d", world=world, **settings)
        start, stop = trainer.share(1)
        part = tokens[start:stop], targets[start:stop]
        return trainer.evaluate([part], local=True).loss, trainer.step(part, local=True, total=1).loss

    expected = parallelize(copy.deepcopy(model), "dp=1", **settings).evaluate([(tokens, targets)]).loss
    for found in run(4, main):
        assert found == pytest.approx((expected, expected), rel=1e-9)

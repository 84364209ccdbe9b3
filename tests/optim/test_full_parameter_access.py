"""Test optimizers that need whole parameters or their norms, however the parameters are split."""

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grid import Grid, ranks_of
from last_outcome import alone, outcome
from meshwise import Plan, PlanError
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import agree, run
from optim.whole_optimizers import Normed, Orthogonal, Undeclared

PLANS = (
    "dp=1",
    "dp=3 zero=3",
    "tp=4 tp_mode=2d",
    "dp=2 tp=4 tp_mode=2d zero=1",
    "pp=2 dp=2 microbatches=2",
    "pp=2 tp=2 dp=2 zero=2 microbatches=2",
)


def build(*, tied: bool) -> GPT:
    shape = GPTConfig(vocabulary=16, context=4, layers=2, heads=2, width=8, mlp_ratio=2, tied=tied, bias=True)
    return GPT(shape).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(16, (rows, 5), generator=generator) for rows in (6, 5, 4)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


@functools.cache
def expected(optimizer: type[torch.optim.Optimizer], *, tied: bool) -> Any:
    model = functools.partial(build, tied=tied)
    return alone(model, loss=next_token_loss, batches=batches(), optimizer=optimizer, lr=0.02, weight_decay=0.1)


OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"norms": Normed, "matrices": Orthogonal}


@pytest.mark.grid(
    Grid({"plan": PLANS, "needs": tuple(OPTIMIZERS)}, strength=1, heavy=lambda cell: ranks_of(cell["plan"]) > 6)
)
def test_a_plan_gives_what_whole_tensors_give(plan: str, needs: str) -> None:
    optimizer, tied = OPTIMIZERS[needs], needs == "matrices"

    def main(world: World) -> Any:
        trainer = parallelize(
            functools.partial(build, tied=tied),
            plan,
            loss=next_token_loss,
            world=world,
            optimizer=optimizer,
            options=Options(example=batches()[0]),
            lr=0.02,
            weight_decay=0.1,
        )
        return outcome(trainer, batches=batches())

    for rank in run(Plan.of(plan).mesh().size, main):
        agree(rank, expected(optimizer, tied=tied), bound=1e-9)  # type: ignore[arg-type] # a class has a hash


def test_the_norm_of_a_slice_alone_would_be_seen() -> None:
    class Local(Normed):
        def step(self) -> None:  # type: ignore[override]
            self.logical.squared_norms = self.of_slices  # type: ignore[assignment,method-assign]
            super().step()

        def of_slices(self, values: Mapping[nn.Parameter, Tensor]) -> dict[str, Tensor]:
            parts = [(p, part) for p in values for part in self.logical.parts(p)]
            return {part.name: values[p][part.start : part.stop].square().sum() for p, part in parts}

    def main(world: World) -> Any:
        model = functools.partial(build, tied=False)
        trainer = parallelize(model, "dp=3 zero=1", loss=next_token_loss, world=world, optimizer=Local, lr=0.02)
        return outcome(trainer, batches=batches())

    with pytest.raises(AssertionError):
        agree(run(3, main)[0], expected(Normed, tied=False), bound=1e-9)


def test_state_of_slices_is_saved_and_loaded_under_another_plan(tmp_path: Any) -> None:
    def train(world: World, *, plan: str, begin: int, end: int) -> Any:
        model = functools.partial(build, tied=False)
        trainer = parallelize(
            model, plan, loss=next_token_loss, world=world, optimizer=Normed, lr=0.02, weight_decay=0.1
        )
        if begin:
            trainer.load(tmp_path / "saved")
        steps = outcome(trainer, batches=batches()[begin:end])
        if not begin:
            trainer.save(tmp_path / "saved")
        return steps

    run(3, functools.partial(train, plan="dp=3 zero=3", begin=0, end=2))
    later = run(4, functools.partial(train, plan="dp=2 tp=2 zero=1", begin=2, end=3))
    agree(later[0], expected(Normed, tied=False)[2:], bound=1e-9)


def test_offload_is_refused_for_an_optimizer_that_needs_whole_parameters() -> None:
    model = functools.partial(build, tied=False)
    with pytest.raises(PlanError, match="Normed needs whole parameters, but offload=optimizer:cpu updates chunks"):
        parallelize(model, "dp=1 offload=optimizer:cpu", loss=next_token_loss, optimizer=Normed, lr=0.02)


def test_an_unknown_need_is_refused() -> None:
    model = functools.partial(build, tied=False)
    with pytest.raises(
        ValueError, match="declares needs='everything'; write one of 'norms', 'matrices', 'replicas', or none"
    ):
        parallelize(model, "dp=1", loss=next_token_loss, optimizer=Undeclared, lr=0.02)

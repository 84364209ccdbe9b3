"""Test unusual uses of a model that once gave wrong numbers or stopped a run without need."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.plan import Plan
from meshwise.testing import agree, run

over_plans = pytest.mark.parametrize(
    "plan", ["dp=2", "dp=3 zero=1 microbatches=2", "dp=3 zero=2 microbatches=2", "dp=3 zero=3"]
)


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


BATCHES = [torch.linspace(-1, 1, rows * 4, dtype=torch.float64).view(rows, 4).sin() for rows in (8, 5, 2)]


class Stack(nn.Module):
    """Blocks and a head; `tied`: the head has the first layer's weight. Every part may be a reentrant checkpoint."""

    def __init__(self, *, tied: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3)])
        self.head = nn.Linear(4, 4)
        self.reentrant = reentrant
        if tied:
            self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for part in (*self.blocks, self.head):
            x = checkpoint(part, x, use_reentrant=True) if self.reentrant else part(x)
        return x


def check(plan: str, model: nn.Module, *, before: Any = None) -> None:
    def main(world: World) -> Any:
        trainer = parallelize(copy.deepcopy(model), plan, world=world, loss=squares, lr=1e-2)
        if before is not None:
            before(trainer)
        return outcome(trainer, batches=BATCHES)

    expected = alone(copy.deepcopy(model), batches=BATCHES, loss=squares, lr=1e-2)
    for steps in run(Plan.parse(plan).mesh().size, main):
        agree(steps, expected, bound=1e-9)


@over_plans
@pytest.mark.parametrize("tied", [False, True])
def test_reentrant_checkpoints_announce_no_gradients(plan: str, *, tied: bool) -> None:
    check(plan, Stack(tied=tied, reentrant=True).double())


@over_plans
def test_gradients_that_no_step_made_do_not_count(plan: str) -> None:
    def before(trainer: Trainer) -> None:
        for parameter in trainer.model.parameters():
            parameter.grad = torch.ones_like(parameter)

    check(plan, Stack().double(), before=before)


class Break(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Any:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> Any:
        raise ZeroDivisionError


@over_plans
def test_a_step_after_one_that_broke_off_in_the_backward(plan: str) -> None:
    def before(trainer: Trainer) -> None:
        handle = trainer.model.get_submodule("blocks.1").register_forward_hook(lambda *given: Break.apply(given[2]))
        with pytest.raises(ZeroDivisionError):
            trainer.step(BATCHES[0])
        handle.remove()

    check(plan, Stack().double(), before=before)


class Idle(Stack):
    """Its first block is never used, and decays."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks[2](self.blocks[1](self.stem(x))))


@over_plans
def test_a_look_at_some_of_the_parameters_does_not_keep_old_ones(plan: str) -> None:
    def before(trainer: Trainer) -> None:
        for name, _ in trainer.full_parameters():
            if name.startswith("blocks.0"):
                break

    check(plan, Idle().double(), before=before)

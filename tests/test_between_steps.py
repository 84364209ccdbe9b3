"""Test which changes users may make to a model between steps; every other change raises an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from joined_worlds import holds_together
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer
from meshwise.testing import run

PLANS = (
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=2 microbatches=2",
    "dp=2 zero=3 microbatches=2",
    "dp=2 zero=1 overlap_gather=1",
)
over_plans = pytest.mark.parametrize("plan", PLANS)


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), output.shape[0]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


def good() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def made(world: World, plan: str, **settings: Any) -> Trainer:
    return parallelize(Two, plan, world=world, **{"loss": squares, "lr": 1e-2, **settings})


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.full_parameters()}


def replace(model: nn.Module) -> None:
    model.get_parameter("second.bias").data = torch.ones(3)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda model: model.half(), "the tensor of '.*' was replaced after the model was parallelized"),
        (replace, "the tensor of 'second.bias' was replaced after the model was parallelized"),
    ],
    ids=["converted", "replaced"],
)
@over_plans
def test_replaced_parameters_are_an_error(plan: str, change: Callable[[nn.Module], Any], message: str) -> None:
    def main(world: World) -> None:
        trainer = made(world, plan)
        trainer.step(good())
        change(trainer.model)
        with pytest.raises(ValueError, match=message):
            trainer.step(good())

    run(2, main)


@pytest.mark.parametrize("plan", PLANS[:3])
def test_a_parameter_with_a_wider_copy_must_not_be_written_to(plan: str) -> None:
    def main(world: World) -> None:
        trainer = parallelize(lambda: Two().bfloat16(), plan, world=world, loss=squares, lr=1e-2)
        trainer.step(good().bfloat16())
        with torch.no_grad():
            trainer.model.get_parameter("first.weight").mul_(2)
        with pytest.raises(ValueError, match=r"'first.weight' was written to .*load them with trainer.load"):
            trainer.step(good().bfloat16())

    run(2, main)


@pytest.mark.parametrize("plan", PLANS[:3])
def test_parameters_without_a_wider_copy_may_be_written_to(plan: str) -> None:
    def main(world: World) -> None:
        trainer = made(world, plan, lr=0.0, weight_decay=0.0)
        with torch.no_grad():
            trainer.model.get_parameter("first.weight").fill_(0.5)
        if holds_together(world) and "zero" in plan:
            with pytest.raises(ValueError, match="share one copy of it, so that each"):
                trainer.step(good())
            return
        trainer.step(good())
        assert dict(trainer.full_parameters())["first.weight"].eq(0.5).all()

    run(2, main)


def test_freed_parameters_cannot_be_loaded_by_the_module() -> None:
    def main(world: World) -> None:
        trainer = made(world, "dp=2 zero=3")
        with pytest.raises(RuntimeError, match=r"zero=3.* call trainer\.load"):
            trainer.model.load_state_dict(Two().state_dict())

    run(2, main)


@over_plans
def test_a_scheduler_of_torch_works_on_the_optimizer(plan: str) -> None:
    def main(world: World) -> None:
        trainer = made(world, plan, optimizer=torch.optim.SGD, lr=0.0)
        for group in trainer.optimizer.param_groups:
            group["lr"] = 1.0
        scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: float(step == 1))
        moved = []
        for _ in range(3):
            before = parameters(trainer)
            trainer.step(good())
            after = parameters(trainer)
            moved.append(any(not torch.equal(before[name], after[name]) for name in before))
            scheduler.step()
        assert moved == [False, True, False]

    run(2, main)

"""ZeRO-3 and losses that read parameters, or ask for a gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.testing import agree, run

WIDTH, BLOCKS = 8, 4


class Clip(nn.Module):
    """Returns features: its head and its temperature are for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 4, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("term", ["head", "penalty"])
def test_the_loss_of_an_open_step_may_read_parameters(term: str) -> None:
    def main(world: World, plan: str) -> list[Any]:
        trainer = parallelize(lambda: Clip().double(), plan, world=world, lr=1e-2)
        model: Any = trainer.model
        found: list[Any] = []
        for batch in batches():
            with trainer.open_step() as step:
                x = step.rows(batch)
                features = step.forward(x)
                if term == "head":
                    total = (features @ model.head.weight.T * model.logit_scale.exp()).square().sum()
                else:
                    penalty = sum(p.square().sum() for p in model.parameters())
                    total = model.head(features).square().sum() + len(x) * penalty
                step.backward(step.mean(total, len(x)))
                found += [step.norm(), step.update().loss]
        return [*found, {name: value.clone() for name, value in trainer.full_parameters()}]

    agree(run(2, main, args=("dp=2 zero=3",))[0], run(1, main, args=("dp=1",))[0], bound=1e-9)


def test_a_gradient_that_a_loss_asked_for_keeps_units_gathered_in_its_own_step_only() -> None:
    steps = (False, True, False, False)

    def main(world: World) -> list[int]:
        asks, whole = False, list[int]()

        def forward(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
            inputs = batch.detach().requires_grad_()
            output = model(inputs)
            return output, torch.autograd.grad(output.sum(), inputs, create_graph=True)[0] if asks else output

        def loss(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, int]:
            model: Any = trainer.model
            whole.append(sum(not bool(block[0].weight.data.isnan().any()) for block in model.blocks))
            return output[0].square().sum() + output[1].square().sum(), len(batch)

        options = Options(forward=forward)
        trainer = parallelize(lambda: Clip().double(), "dp=2 zero=3", world=world, lr=1e-2, loss=loss, options=options)
        for batch, asks in zip(batches(len(steps)), steps, strict=True):  # noqa: B007 - forward reads it
            trainer.step(batch)
        return whole

    for whole in run(2, main):
        assert whole == [1, BLOCKS, 1, 1]

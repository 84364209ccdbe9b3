"""ZeRO-3 and losses that read parameters, or ask for a gradient."""

from typing import Any

import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.testing import run

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

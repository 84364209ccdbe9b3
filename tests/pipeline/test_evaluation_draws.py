"""Random draws in an evaluation are the same on every stage and under every plan."""

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.testing import run


class Denoiser(nn.Module):
    """Predicts the noise that it adds: the last stage of a pipeline needs that of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn_like(x)
        return self.blocks(x + noise), noise


def squares(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, int]:
    predicted, noise = output
    return (predicted - noise).square().sum(), len(batch)


BATCHES = [torch.randn(8, 8, generator=torch.Generator().manual_seed(n)).double() for n in range(2)]


def evaluated(world: World, plan: str, trained: bool) -> float:
    trainer = parallelize(
        Denoiser().double(), plan, loss=squares, world=world, lr=0.01, options=Options(example=BATCHES[0])
    )
    if trained:
        trainer.step(BATCHES[0])
        trainer.predict(BATCHES[0])
    torch.manual_seed(world.rank)  # each rank's own stream, as after a resume under another plan
    loss: float = trainer.evaluate(BATCHES).loss
    assert trainer.evaluate(BATCHES).loss == loss
    trainer.close()
    return loss


@pytest.mark.parametrize("plan", ["dp=2 zero=1", "pp=2 microbatches=2", "dp=2 pp=2 microbatches=2 zero=3"])
@pytest.mark.parametrize("trained", [False, True])
def test_an_evaluation_draws_the_same_under_every_plan(plan: str, *, trained: bool) -> None:
    [single] = run(1, evaluated, args=("dp=1", trained))
    split = run(Plan.parse(plan).mesh().size, evaluated, args=(plan, trained))
    assert split == pytest.approx([single] * len(split), rel=1e-9)

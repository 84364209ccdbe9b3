"""Test embeddings with `max_norm`, which write to their weight in the forward, and the plans that refuse them."""

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import PlanError
from meshwise.testing import run

BATCHES = torch.randint(9, (4, 6, 5), generator=torch.Generator().manual_seed(0))


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (output - 1).square().sum(), batch.numel()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 6, max_norm=0.8), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("plan", ["dp=1", "zero=3 microbatches=2", "pp=2 microbatches=2"])
def test_one_tensor_is_rescaled_as_torch_does(plan: str) -> None:
    expected, parts = model(), 1 if plan == "dp=1" else 2
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.3)
    for batch in BATCHES:
        optimizer.zero_grad()
        for part in batch.chunk(parts):
            (squares(expected(part), batch)[0] / batch.numel()).backward()
        optimizer.step()

    def train(world: World) -> dict[str, Tensor]:
        options = Options(example=BATCHES[0])
        trainer = parallelize(
            model(), plan, loss=squares, world=world, options=options, optimizer=torch.optim.SGD, lr=0.3
        )
        for batch in BATCHES:
            trainer.step(batch)
        return {name: value.clone() for name, value in trainer.full_parameters()}

    found = run(2 if "pp" in plan else 1, train)[0]
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "plan",
    ["dp=2", "dp=2 zero=3", "dp=1 precision=bf16", "dp=1 zero=3 offload=optimizer:disk,params:disk"],
)
def test_what_would_lose_it_is_refused(plan: str) -> None:
    def train(world: World) -> None:
        with pytest.raises(PlanError, match="other copies of the weight exist"):
            parallelize(model(), plan, loss=squares, world=world)

    run(2 if "dp=2" in plan else 1, train)

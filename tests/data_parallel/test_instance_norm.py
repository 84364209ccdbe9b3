"""Test that the running statistics of an instance norm under replicas equal those of one process."""

import copy

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.testing import run

ROWS = (10, 7, 2)  # of each step; the last are fewer than three ranks


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (output - 1).square().sum(), len(batch)


@pytest.mark.parametrize("momentum", [0.1, 0.5])
@pytest.mark.parametrize("plan", ["dp=2", "dp=3 zero=3", "dp=2 zero=1 recompute=full", "dp=2 pp=2 partition=params"])
def test_running_statistics_are_those_of_all_samples(plan: str, momentum: float) -> None:
    torch.manual_seed(0)
    norm = nn.InstanceNorm1d(5, affine=True, track_running_stats=True, momentum=momentum)
    model = nn.Sequential(nn.Sequential(nn.Conv1d(2, 5, 2), norm, nn.Tanh()), nn.Flatten(), nn.Linear(20, 3)).double()
    batches = [torch.randn(count, 2, 5, dtype=torch.float64) for count in ROWS]
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        (squares(expected(batch), batch)[0] / len(batch)).backward()
        optimizer.step()

    def train(world: World) -> tuple[dict[str, Tensor], float]:
        options = Options(example=batches[0], recomputed=("0",) if "recompute" in plan else ())
        trainer = parallelize(
            copy.deepcopy(model),
            plan,
            loss=squares,
            world=world,
            options=options,
            optimizer=torch.optim.SGD,
            lr=0.1,
        )
        for batch in batches:
            trainer.step(batch)
        loss = trainer.evaluate([batches[0]]).loss
        found = {name: value.clone() for name, value in trainer.full_parameters()}
        return found | {name: value.clone() for name, value in trainer.full_buffers()}, loss

    expected.eval()
    for found, loss in run(Plan.parse(plan).mesh().size, train):
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
        total, count = squares(expected(batches[0]), batches[0])
        assert loss == pytest.approx(float(total.detach()) / count, rel=1e-12)

"""Test that an instance norm with running statistics is refused under replicas, and trains on one rank."""

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.plan import PlanError
from meshwise.testing import run


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (output - 1).square().sum(), len(batch)


def trained(plan: str, *, world: World, track: bool) -> float:
    norm = nn.InstanceNorm1d(5, affine=True, track_running_stats=track)
    model = nn.Sequential(nn.Conv1d(2, 5, 2), norm, nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))
    return parallelize(model, plan, loss=squares, world=world, lr=0.1).step(torch.ones(4, 2, 5)).loss


def test_running_statistics_are_refused_where_replicas_would_differ() -> None:
    with pytest.raises(PlanError, match=r"^1 is an instance norm .* build it with track_running_stats=False"):
        run(2, lambda world: trained("dp=2", world=world, track=True))
    assert run(1, lambda world: trained("dp=1", world=world, track=True))
    assert run(2, lambda world: trained("dp=2", world=world, track=False))

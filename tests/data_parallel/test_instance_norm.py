"""Test that instance norms train under replicas as in one process, by the statistics of each sample."""

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.testing import run


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (output - 1).square().sum(), len(batch)


def trained(plan: str, *, world: World, track: bool) -> float:
    def model() -> nn.Module:
        norm = nn.InstanceNorm1d(5, affine=True, track_running_stats=track)
        return nn.Sequential(nn.Conv1d(2, 5, 2), norm, nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))

    return parallelize(model, plan, loss=squares, world=world, lr=0.1).step(torch.arange(40.0).view(4, 2, 5).sin()).loss


def test_instance_norms_train_with_and_without_running_statistics() -> None:
    for track in (False, True):
        [whole] = run(1, lambda world, track=track: trained("dp=1", world=world, track=track))
        split = run(2, lambda world, track=track: trained("dp=2", world=world, track=track))
        assert split == pytest.approx([whole, whole], rel=1e-6)

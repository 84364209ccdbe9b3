"""A model of two layers for tests, with batches for it and the state that its trainer holds."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.engine.trainer import Trainer

PLANS = ("dp=2", "dp=2 zero=1", "dp=2 zero=2 microbatches=2", "dp=2 zero=3 microbatches=2")
over_plans = pytest.mark.parametrize("plan", PLANS)
ROWS, WIDTH = 8, 4


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), output.shape[0]


class Two(nn.Module):
    """Two layers. `stray` is called in every forward."""

    def __init__(self, stray: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.stray = stray
        self.first = nn.Linear(WIDTH, 5)
        self.dropout = nn.Dropout(0.0)
        self.second = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        self.stray()
        return self.second(self.dropout(torch.tanh(self.first(x))))


def good(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def bad(row: int = 7) -> Tensor:
    batch = good()
    batch[row, 1] = math.nan
    return batch


def made(world: World, plan: str, **settings: Any) -> Trainer:
    return parallelize(Two, plan, world=world, **{"loss": squares, "lr": 1e-2, **settings})


def state(trainer: Trainer) -> dict[str, Any]:
    """Parameters and everything the optimizer holds on this rank."""
    held = trainer.optimizer.state_dict()["state"]
    return {
        "parameters": {name: value.clone() for name, value in trainer.full_parameters()},
        "optimizer": {str(n): {key: value.clone() for key, value in held[n].items()} for n in held},
    }

"""The model that the tests of tiers train, and its outcome."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.memory.swap_file import SwapConfig, TierError
from run_on_processes import ON_GPU

STEPS, WIDTH = 3, 128
SMALL = SwapConfig(buffers=2, buffer=1 << 16)
"""Staging buffers that hold a part of a layer, so that every update takes rounds."""


class Blocks(nn.Module):
    """Blocks of which one has more elements than are updated at once."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        result: Tensor = self.head(self.norm(x))
        return result


def squares(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def batches(count: int = STEPS) -> list[Tensor]:
    return list(torch.randn(count, 8, WIDTH, generator=torch.Generator().manual_seed(0)))


CLIPPED = Options(clip_norm=0.5, swap=SMALL, example=torch.zeros(8, WIDTH))


def under(
    world: World,
    plan: str,
    *,
    kind: type = torch.optim.AdamW,
    options: Options = CLIPPED,
    layers: int = 3,
    **arguments: Any,
) -> Trainer:
    arguments = {"lr": 1e-2, "weight_decay": 0.1} | arguments
    return parallelize(
        partial(Blocks, layers), plan, loss=squares, world=world, optimizer=kind, options=options, **arguments
    )


def outcome(trainer: Trainer) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in trainer.full_parameters()}
    return found | {f"gradient of {name}": value.clone() for name, value in trainer.full_gradients()}


def trained(world: World, plan: str, **arguments: Any) -> dict[str, Tensor]:
    trainer = under(world, plan, **arguments)
    results = [trainer.step(batch) for batch in batches()]
    numbers = {f"loss and norm {n}": torch.tensor([r.loss, r.grad_norm]) for n, r in enumerate(results)}
    found = outcome(trainer) | numbers
    trainer.close()
    return found


def the_same(found: dict[str, Tensor], expected: dict[str, Tensor], *, on_gpu: float = 1e-5) -> None:
    """Every bit of it. The CPU updates what is not on a GPU, so there within `on_gpu` of a tensor's largest value."""
    assert found.keys() == expected.keys()
    if ON_GPU in os.environ:
        apart = {
            name: (found[name] - value).abs().max() / value.abs().max().clamp(1e-30) for name, value in expected.items()
        }
        assert max(apart.values()) <= on_gpu, apart
        return
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different


def is_refused_until_a_load(trainer: Trainer, *, folder: Path) -> None:
    """A trainer that is part old and part new neither steps nor saves; `folder / "saved"` is of the first step."""
    _, second, third = batches()
    for use in (lambda: trainer.step(third), lambda: trainer.save(folder / "torn")):
        with pytest.raises(TierError, match="part old and part new; load a checkpoint to continue"):
            use()
    assert not (folder / "torn").exists()
    trainer.load(folder / "saved")
    trainer.step(second)
    trainer.step(third)

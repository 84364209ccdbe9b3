"""Train an unusual model by `parallelize` and on one process, and compare."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from last_outcome import alone, outcome
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.trainer import Trainer
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import Plan
from meshwise.testing import agree, run

BOUND = 1e-9
WIDTH = 6

Batch = Any
Loss = Callable[[Any, Batch], tuple[Tensor, int]]


def squares(output: Any, batch: Batch) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def numbers(*rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) for size in rows]


def images(*rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64) for size in rows]


class Chain(nn.Module):
    """Layers, one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def linears(count: int = 4) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return build().double()


def trainer(world: World, plan: str, model: nn.Module, **settings: Any) -> Trainer:
    """Cut by parameters: a cut by time takes some, and is another on every machine."""
    options = settings.pop("options")
    parsed = replace(Plan.parse(plan), partition="params")
    return parallelize(
        copy.deepcopy(model), parsed, world=world, options=options, lr=1e-2, weight_decay=0.1, **settings
    )


def trains_like_one(
    model: nn.Module, plan: str, batches: list[Batch], *, loss: Loss = squares, where: CutOptions | None = None
) -> None:
    options = Options(clip_norm=0.5, example=batches[0], cut=where or CutOptions())
    whole = alone(
        copy.deepcopy(model), batches=copy.deepcopy(batches), loss=loss, options=options, lr=1e-2, weight_decay=0.1
    )

    def main(world: World) -> Any:
        split = trainer(world, plan, model, loss=loss, options=options)
        steps = outcome(split, batches=batches)
        split.close()
        return steps

    for steps in run(Plan.parse(plan).mesh().size, main):
        agree(steps, whole, bound=BOUND)

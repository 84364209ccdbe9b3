"""Test that adapters train beside quantized parameters, which stay as they are, and come back to the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.plan import Plan, PlanError
from meshwise.testing import agree, alone, outcome, run


class Packed(nn.Parameter):
    """Bytes of a quantized matrix, with a scale; of a class like bitsandbytes' `Params4bit`."""

    scale: Tensor

    def __deepcopy__(self, memo: dict[int, object]) -> Packed:
        return packed(self.data.clone(), self.scale)


Packed.__module__ = "bitsandbytes.nn.modules"


def packed(values: Tensor, scale: Tensor) -> Packed:
    made = Packed(values, requires_grad=False)
    made.scale = scale
    return made


class Adapted(nn.Module):
    """A quantized linear and a trained product of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        values = torch.randint(256, (width, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(width))
        self.weight = packed(values, torch.tensor(0.01, dtype=torch.float64))
        self.down = nn.Parameter(torch.linspace(-1, 1, 2 * width, dtype=torch.float64).view(2, width))
        self.up = nn.Parameter(torch.linspace(1, -1, 2 * width, dtype=torch.float64).view(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        base = x @ ((self.weight.double() - 128) * self.weight.scale).mT
        return torch.tanh(base + x @ self.down.mT @ self.up.mT)


def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (output - batch).square().sum(), len(batch)


MODEL = nn.Sequential(Adapted(6), Adapted(6))
BATCHES = [torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)) for rows in (4, 7)]


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "dp=3 zero=3", "dp=2 zero=2 microbatches=2"])
def test_adapters_of_quantized_matrices_train_as_on_one_process(plan: str) -> None:
    def main(world: World) -> object:
        model = copy.deepcopy(MODEL)
        trainer = parallelize(model, plan, loss=loss, world=world, lr=1e-2)
        found = outcome(trainer, batches=BATCHES)
        assert "0.weight" not in dict(trainer.model.named_parameters())
        trainer.close()
        assert isinstance(dict(model.named_parameters())["0.weight"], Packed)
        return found

    found = run(Plan.parse(plan).mesh().size, main)[0]
    expected = alone(copy.deepcopy(MODEL), loss=loss, batches=BATCHES, lr=1e-2)
    for steps in expected:
        for values in (steps["gradients"], steps["parameters"]):
            for name in ("0.weight", "1.weight"):
                values.pop(name, None)
    agree(found, expected, bound=1e-9)


def test_a_plan_that_splits_quantized_matrices_is_refused_and_leaves_the_model_as_it_is() -> None:
    def main(world: World) -> None:
        model = copy.deepcopy(MODEL)
        with pytest.raises(
            PlanError, match=r"'tp=2' would split the quantized 0\.weight\. Nearest that works: 'tp=1 ep=1 pp=1'"
        ):
            parallelize(model, "tp=2", loss=loss, world=world, lr=1e-2)
        assert isinstance(dict(model.named_parameters())["0.weight"], Packed)

    run(2, main)

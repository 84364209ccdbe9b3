"""The parameter groups of an optimizer have one order under every plan, so a scheduler can name them by number."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import run


def build() -> GPT:
    return GPT(GPTConfig(vocabulary=16, context=4, layers=4, heads=2, width=8, bias=True))


def options_of(name: str, parameter: Tensor) -> dict[str, float]:
    """Return options by the last module name, in an order that neither the names nor the values sort."""
    module = name.split(".")[-2]
    return {"lr": 1e-3 * (1 + sum(map(ord, module)) % 5), "weight_decay": 0.0 if parameter.ndim < 2 else 0.1}


@functools.cache
def groups(plan: str) -> list[list[tuple[float, float]]]:
    tokens = torch.zeros(4, 4, dtype=torch.int64)

    def main(world: World) -> Any:
        options = Options(parameter_options=options_of, example=(tokens, tokens))
        trainer = parallelize(build, plan, loss=next_token_loss, world=world, options=options, lr=1e-3)
        return [(group["lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups]

    return run(Plan.of(plan).mesh().size, main)


@pytest.mark.parametrize("plan", ["dp=2 zero=1", "dp=2 zero=3", "tp=2", "pp=2 microbatches=2", "pp=2 dp=2 zero=1"])
def test_groups_have_the_order_of_one_rank(plan: str) -> None:
    [alone] = groups("dp=1")
    assert len(alone) == 8
    assert alone != sorted(alone)
    assert all(found == alone for found in groups(plan))

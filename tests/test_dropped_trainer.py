"""Test that the memory of a trainer is free once a script has dropped it, as a notebook does that trains again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig, next_token_loss
from meshwise.testing import run

PLANS = (
    "dp=1",
    "dp=1 recompute=selective precision=bf16",
    "dp=1 zero=3 offload=params:cpu,activations:cpu",
    "dp=2 zero=1 microbatches=2",
    "dp=2 zero=2 overlap_gather=1",
    "dp=2 zero=3",
    "tp=2 sequence_parallel=1",
    "cp=2",
    "pp=2 microbatches=4 schedule=zb-h1",
)


def build() -> nn.Module:
    return GPT(GPTConfig(vocabulary=16, context=8, layers=2, heads=2, width=8, dropout=0.1))


def trained_and_dropped(world: World, plan: str) -> list[weakref.ref[nn.Parameter]]:
    tokens = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1], tokens[:, 1:]
    options = Options(example=batch if "pp" in plan else None, noise=plan == "dp=2 zero=1 microbatches=2")
    trainer = parallelize(build, plan, loss=next_token_loss, world=world, options=options, lr=1e-3)
    for _ in range(2):
        trainer.step(batch)
    return [weakref.ref(parameter) for parameter in trainer.model.parameters()]


def left(world: World, plan: str) -> tuple[int, int]:
    parameters = trained_and_dropped(world, plan)
    world.barrier()
    gc.collect()
    return len(parameters), sum(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("plan", PLANS)
def test_a_dropped_trainer_leaves_no_parameters(plan: str) -> None:
    for had, has in run(Plan.parse(plan).mesh().size, left, args=(plan,)):
        assert had > 0
        assert has == 0

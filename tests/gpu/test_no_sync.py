"""Test that a step does not wait for the GPU, but for the one read of loss, count and norm, and what follows from it.

torch's debug mode raises at each call that blocks the host until the GPU has finished its work."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.reference import GPT, GPTConfig, next_token_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "plan",
    [
        "dp=1",
        "dp=1 precision=bf16",
        "dp=1 microbatches=4",
        "dp=1 recompute=full",
        "dp=1 recompute=selective",
        "dp=1 offload=activations:cpu",
        "dp=1 random=local",
    ],
)
def test_a_step_does_not_wait_for_the_gpu(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    config = GPTConfig(vocabulary=64, context=32, layers=2, heads=2, width=64, dropout=0.1)
    trainer = parallelize(lambda: GPT(config), plan, loss=next_token_loss, lr=1e-3)
    tokens = torch.randint(64, (8, 33), device=device)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    for _ in range(2):
        trainer.step(batch)
    totals = World.totals

    def read(world: World, x: Tensor, **options: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return totals(world, x, **options)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(World, "totals", read)
    with no_waits():
        result = trainer.step(batch)
    assert result.loss > 0
    trainer.close()

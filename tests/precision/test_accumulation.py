"""Gradients of micro-batches are added up in fp32, and rounded for a journey alone: beside a loop of plain torch."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.engine.parallelize import parallelize

PARTS = 4


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return functional.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_rank_rounds_no_sum_of_gradients(precision: str, zero: int) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * PARTS, 16, generator=generator)
    batch = x, torch.randint(4, (8 * PARTS,), generator=generator)
    model = nn.Linear(16, 4)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    half = nn.Linear(16, 4, dtype=dtype)
    half.load_state_dict(model.state_dict())
    scale = 8192 / len(x) if precision == "fp16" else 1.0
    sums = [torch.zeros_like(master) for master in masters]
    for inputs, targets in zip(x.chunk(PARTS), batch[1].chunk(PARTS), strict=True):
        half.zero_grad()
        (loss(half(inputs.to(dtype)).float(), (inputs, targets))[0] * scale).backward()
        for total, parameter in zip(sums, half.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad

    trainer = parallelize(
        model, f"zero={zero} microbatches={PARTS} precision={precision}", loss=loss, optimizer=torch.optim.SGD, lr=1.0
    )
    trainer.step(batch)
    for (_, gradient), total in zip(trainer.full_gradients(), sums, strict=True):
        torch.testing.assert_close(gradient, total / scale / len(x), rtol=1e-6, atol=1e-9)

"""Tokens per second are those that a run tells: of what the loss counts, not of the numbers that its input has."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwise.simulate.rehearsal import RehearsalSubject, rehearse
from simulate.subjects import CONFIG, gpt_subject


def classes(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(output, batch[1], reduction="sum"), batch[1].numel()


def twice(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
    """As many again, and a number of NumPy."""
    return classes(output, batch)[0], np.int64(2 * batch[1].numel())


def labelled(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of which only the values would tell the count."""
    return classes(output, batch)[0], (batch[1] != -100).sum()


def values(output: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    return output.square().sum(), output.numel()


def least(output: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return output.square().sum(), (output > 0).sum()


def pictures() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(), nn.Linear(32, 10))


IMAGES = torch.empty(12, 3, 8, 8)
LABELS = torch.zeros(12, dtype=torch.long)


@pytest.mark.parametrize("plan", ["dp=1", "dp=4 zero=3", "dp=5", "dp=2 microbatches=3", "pp=2 microbatches=2"])
@pytest.mark.parametrize(
    "loss, batch, tokens",
    [
        (classes, (IMAGES, LABELS), 12),
        (twice, (IMAGES, LABELS), 24),
        (labelled, (IMAGES, LABELS), 12),
        (values, (IMAGES,), 120),
        (least, (IMAGES,), 12),
    ],
)
def test_what_the_loss_counts(plan: str, loss: object, batch: tuple[Tensor, ...], tokens: int) -> None:
    ranks = 4 if plan == "dp=4 zero=3" else {"dp=5": 5, "dp=1": 1}.get(plan, 2)
    subject = RehearsalSubject(pictures, loss, batch)  # type: ignore[arg-type]
    assert rehearse(subject, plan=plan, ranks=ranks).tokens == tokens


@pytest.mark.parametrize("plan", ["dp=2 tp=2", "dp=2 tp=2 sequence_parallel=1", "tp=4 tp_mode=2d", "tp=2 pp=2"])
def test_tokens_of_a_split_model(plan: str) -> None:
    assert rehearse(gpt_subject(), plan=plan, ranks=4).tokens == 16 * CONFIG.context

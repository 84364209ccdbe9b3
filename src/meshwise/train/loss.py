"""Losses as the engine wants them: the sum over the samples of a batch, and how many terms it summed.

A mean says no longer what it was the mean of, so means over micro-batches, ranks or padded sequences cannot be put
together. A sum and a count can.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def cross_entropy(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats of `output` [..., classes] against the classes in `batch[1]` [...].

    Counts the targets that are not -100, which stands for "no target here".
    """
    targets = batch[1].reshape(-1)
    total = functional.cross_entropy(output.reshape(-1, output.shape[-1]), targets, reduction="sum")
    return total, (targets != -100).sum()


def mean_squared_error(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Squared difference of `output` and `batch[1]`, of the same shape; counts its elements."""
    target = batch[1]
    if output.shape != target.shape:
        raise ValueError(f"mse: the output is {tuple(output.shape)} but the target {tuple(target.shape)}")
    return torch.square(output - target).sum(), target.numel()

"""The loss of a regression as the engine wants losses: a sum, and how many terms it summed.

A mean says no longer what it was the mean of, so means over micro-batches, ranks or padded sequences cannot be put
together. A sum and a count can.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mean_squared_error(output: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Squared difference of `output` and `batch[1]`, of the same shape, summed; counts its elements.

    Raises ValueError when the shapes differ: broadcasting would count what is not there.
    """
    target = batch[1]
    if output.shape != target.shape:
        raise ValueError(f"mse: the output is {tuple(output.shape)} but the target {tuple(target.shape)}")
    return torch.square(output - target).sum(), target.numel()

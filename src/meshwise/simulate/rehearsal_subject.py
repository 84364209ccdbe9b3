"""Define `RehearsalSubject`, the training that a rehearsal runs: all that `parallelize` gets, except the plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from meshwise.engine.parallelize import Options
from meshwise.model.forward import Loss
from meshwise.optim.flat_optimizer import OptimizerClass

Device: TypeAlias = Literal["cpu", "cuda"]
"""Kind of device of the ranks that are predicted; the rehearsal itself needs no device."""


@dataclass(frozen=True)
class RehearsalSubject:
    """Training that is rehearsed under one or several plans: the arguments of `parallelize` except the plan."""

    model: nn.Module | Callable[[], nn.Module]
    """Module, which is not changed, or the function that builds it."""
    loss: Loss
    """Function `loss(output, batch)` that returns (sum, count)."""
    batch: Any
    """Global batch like those of the training. Its shapes count, and the values of integer and boolean tensors."""
    optimizer: OptimizerClass = torch.optim.AdamW
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the optimizer."""
    options: Options = field(default_factory=Options)

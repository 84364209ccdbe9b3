"""Bundle the inputs of a rehearsal: everything of a run except its plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from meshwise.engine.parallelize import Options
from meshwise.model.forward import Loss
from meshwise.optim.flat_optimizer import OptimizerClass

Device: TypeAlias = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class RehearsalSubject:
    """Training to rehearse: everything of a run except its plan."""

    model: nn.Module | Callable[[], nn.Module]
    """A module, which is left as it is, or the function that builds it."""
    loss: Loss
    """`loss(output, batch)` returns (sum, count)."""
    batch: Any
    """A global batch like those to come; of its tensors only the shapes matter, and of how many rows it has."""
    optimizer: OptimizerClass = torch.optim.AdamW
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer."""
    options: Options = field(default_factory=Options)

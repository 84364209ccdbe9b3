"""Base class of the optimizers here that need norms or matrices of whole parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.model.full_parameter_access import LogicalTensors


class WholeParameterOptimizer(torch.optim.Optimizer):
    """Optimizer with the keyword arguments and defaults of `DEFAULTS`; every rank calls `step`, without a closure."""

    DEFAULTS: Mapping[str, Any] = {}

    def __init__(self, params: Iterable[Any], *, logical: LogicalTensors, **arguments: Any) -> None:
        name = type(self).__name__
        if unknown := sorted(set(arguments) - set(self.DEFAULTS)):
            raise ValueError(f"{name} takes no {', '.join(unknown)}; it takes {', '.join(self.DEFAULTS)}")
        super().__init__(params, {**self.DEFAULTS, **arguments})
        if not self.defaults["lr"] >= 0:
            raise ValueError(f"Invalid learning rate: {self.defaults['lr']}; give a rate of 0 or above")
        self.logical = logical

    def kept(self, parameter: nn.Parameter, *, key: str) -> Tensor:
        """Return the state `key` of a parameter, of the parameter's shape; zeros the first time."""
        state = self.state[parameter]
        if key not in state:
            state[key] = torch.zeros_like(parameter, requires_grad=False)
        found: Tensor = state[key]
        return found

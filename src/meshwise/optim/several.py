"""Run several optimizers at once, each for its own parameter groups (`Several`).

    optimizers = {"hidden": (Muon, {"lr": 0.02}), "rest": (torch.optim.AdamW, {"lr": 3e-4})}
    parallelize(model, plan, loss=loss, optimizer=Several, optimizers=optimizers)

`hidden` are the matrices of the model except its embeddings and its head, as `parameter_rules.hidden_matrices` finds
them. For another division `Options(parameter_options=…)` returns {"optimizer": "hidden"} for a parameter."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from meshwise.model.full_parameter_access import LogicalTensors
from meshwise.model.parameter_table import ParameterOptions
from meshwise.optim.flat_optimizer import OptimizerClass, build_optimizer
from meshwise.optim.parameter_rules import parameter_rule

Optimizers = Mapping[str, tuple[OptimizerClass, Mapping[str, Any]]]
"""Class and keyword arguments of each optimizer, by a name."""


class Several(torch.optim.Optimizer):
    """Optimizers that share one list of groups and one state; the key `optimizer` of a group names its own.

    Raises ValueError for a group with another name."""

    needs = "matrices"

    def __init__(self, params: Iterable[Any], *, logical: LogicalTensors, optimizers: Optimizers) -> None:
        super().__init__(params, {})
        for group in self.param_groups:
            if (name := group.get("optimizer")) not in optimizers:
                raise ValueError(
                    f"a parameter group has optimizer={name!r}, and there are {', '.join(optimizers)}; let "
                    f'parameter_options return {{"optimizer": "{next(iter(optimizers), "")}"}} for its parameters'
                )
        self.name = " and ".join(kind.__name__ for kind, _ in optimizers.values())
        self._optimizers = []
        for name, (kind, arguments) in optimizers.items():
            if own := [group for group in self.param_groups if group["optimizer"] == name]:
                optimizer = build_optimizer(kind, groups=own, logical=logical, **arguments)
                self.state.update(optimizer.state)
                optimizer.param_groups, optimizer.state = own, self.state
                self._optimizers.append(optimizer)

    @staticmethod
    def parameter_options(module: nn.Module) -> ParameterOptions:
        """Return the default division of a model's parameters: `hidden` and `rest`."""
        return parameter_rule(module, several=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - no closure under a plan
        """Let each optimizer update its parameters. Every rank calls it."""
        for optimizer in self._optimizers:
            optimizer.step()

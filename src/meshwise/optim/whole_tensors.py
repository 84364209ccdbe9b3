"""Run an optimizer class on whole tensors, each of them on one rank (`whole`): Adafactor, Shampoo, your own class.

An update by rows, columns, norms or matrices is another algorithm on a slice. Here each parameter has its own instance
of the class, and the step of the instance runs on the rank that owns the parameter:

    slices of values and gradients ── gathered on the owner ── step of the class ── new values ── slices

`data_parallel/whole_parameter_functions.py` describes the owners of parameters, docs/large_batch.md what they store."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshwise.model.whole_parameters import LogicalTensors
from meshwise.optim.build_optimizer import REFUSED_BY_WHOLE, OptimizerClass, refuse_bases, slice_difference

_GROUP = "group"
"""Key of a parameter's state: the values that the step of the class wrote into its parameter group, such as a count."""


class WholeTensors(torch.optim.Optimizer):
    """Optimizer that steps the class `kind` on whole tensors. `whole` makes a subclass for a class.

    It has the groups and hyperparameters of `kind`, so a scheduler sets its rates. Raises ValueError if updates of
    `kind` depend on other parameters, or if `kind` refuses a parameter."""

    needs = "matrices"
    kind: ClassVar[OptimizerClass]

    def __init__(self, params: Iterable[Any], *, logical: LogicalTensors, **arguments: Any) -> None:
        kind = self.kind
        if how := slice_difference(kind, arguments=arguments, single=True):
            raise ValueError(
                f"{kind.__name__} updates a parameter by values of others, and whole() cannot: {how}; use AdamW"
            )
        super().__init__(params, kind([nn.Parameter(torch.zeros(1, 1))], **arguments).defaults)
        self.logical = logical
        self._steps: dict[nn.Parameter, tuple[Mapping[str, Any], torch.optim.Optimizer]] = {}
        for name, key, group in logical.owned(self.param_groups):
            try:
                one = kind([{**_values(group), "params": [key]}], **arguments)
            except ValueError as error:
                raise ValueError(f"{kind.__name__} refuses {name!r} of shape {tuple(key.shape)}: {error}") from error
            self._steps[key] = group, one
            self.state.update(one.state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - no closure under a plan
        """Update all parameters. Every rank calls this method."""
        gradients = {p: p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        values = {p: p.detach() for p in gradients}
        self.logical.map_whole(values, gradients, groups=self.param_groups, function=self._stepped)

    def _stepped(self, key: nn.Parameter, value: Tensor, gradient: Tensor) -> Tensor:
        """Return the values of a parameter after a step of the class. Between steps, `key` stores a single element."""
        group, one = self._steps[key]
        written = self.state[key].pop(_GROUP, {})
        before = {**_values(group), **written}
        one.param_groups, one.state = [{**before, "params": [key]}], self.state
        stub, key.data, key.grad = key.data, value, gradient
        one.step()
        result, key.data, key.grad = key.data, stub, None
        written |= {name: it for name, it in _values(one.param_groups[0]).items() if it is not before.get(name)}
        if written:
            self.state[key][_GROUP] = written
        return result


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "names")}


def whole(kind: OptimizerClass) -> OptimizerClass:
    """Return an optimizer class that steps `kind` on whole tensors: `optimizer=whole(torch.optim.Adafactor), lr=1e-2`.

    The class takes the arguments of `kind`. Raises ValueError for LBFGS, SparseAdam, and any non-optimizer."""
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"whole({kind!r}) needs an optimizer class: whole(torch.optim.Adafactor)")  # noqa: TRY004
    refuse_bases(kind, names=REFUSED_BY_WHOLE)
    return type(f"whole({kind.__name__})", (WholeTensors,), {"kind": kind, "__doc__": kind.__doc__})

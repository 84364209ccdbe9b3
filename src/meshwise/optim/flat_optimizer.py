"""Build a torch optimizer over the flat slices that a rank owns, or refuse a class that slices would make wrong.

An elementwise optimizer such as AdamW computes the same numbers on slices as on whole tensors. An optimizer that uses
rows, columns or the norm of a tensor does not. Such a class declares `needs` and receives access to whole tensors
(`model.full_parameter_access`). Classes of torch that need whole tensors are refused.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from meshwise.model.full_parameter_access import NEEDS, LogicalTensors
from meshwise.optim.group_hyperparameters import IMPLEMENTATIONS

OptimizerClass: TypeAlias = type[torch.optim.Optimizer]
"""A class of torch optimizers, such as `torch.optim.AdamW`."""

NEED_WHOLE_TENSORS: Mapping[str, str] = {
    "Adafactor": "it factors the second moment of a matrix into rows and columns",
    "Muon": "it orthogonalises the momentum of a whole matrix",
    "LBFGS": "it takes inner products over the whole model and calls the loss several times a step",
    "SparseAdam": "it needs sparse gradients, and buckets are dense",
}
"""Why torch's optimizers of these names cannot update slices; classes derived from them are refused too."""


def flat_optimizer(
    optimizer: OptimizerClass,
    *,
    groups: Mapping[tuple[tuple[str, Any], ...], Sequence[nn.Parameter]],
    logical: LogicalTensors | None = None,
    **arguments: Any,
) -> torch.optim.Optimizer:
    """Build `optimizer` with one parameter group for each key of `groups`, in order; a group may be empty on a rank.

    Uses torch's fused implementation, which reads and writes every buffer once, if the class has one, no parameter is
    complex, and `arguments` do not name an implementation.

    groups: flat slices by their optimizer options.
    logical: access to whole parameters; passed only to a class that declares `needs`.

    Raises ValueError if `optimizer` is no optimizer class, is in `NEED_WHOLE_TENSORS`, or does not take an argument.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ValueError(  # noqa: TRY004
            f"optimizer={optimizer!r} is not an optimizer class; pass a class and its arguments: "
            "parallelize(…, optimizer=torch.optim.AdamW, lr=3e-4)"
        )
    if base := next((base.__name__ for base in optimizer.__mro__ if base.__name__ in NEED_WHOLE_TENSORS), None):
        derived = "" if base == optimizer.__name__ else f", as a kind of {base},"
        raise ValueError(
            f"{optimizer.__name__}{derived} cannot run on slices of parameters: {NEED_WHOLE_TENSORS[base]}; use an "
            "elementwise optimizer such as AdamW, Adam, SGD, RMSprop, Adagrad, NAdam, RAdam or Lion-like ones"
        )
    if needs_whole(optimizer):
        arguments["logical"] = logical
    accepted = inspect.signature(optimizer).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    if not takes_any and (unknown := sorted(set(arguments) - set(accepted))):
        raise ValueError(
            f"{optimizer.__name__} takes no {', '.join(unknown)}; it takes {', '.join(list(accepted)[1:])}"
        )
    plain = not any(parameter.is_complex() for owned in groups.values() for parameter in owned)
    if plain and "fused" in accepted and not IMPLEMENTATIONS & set(arguments):
        arguments["fused"] = True
    return optimizer([{"params": list(owned), **dict(options)} for options, owned in groups.items()], **arguments)


def needs_whole(optimizer: object) -> bool:
    """Return whether an optimizer class declares `needs`: access to whole parameters or to their norms.

    Raises ValueError if `needs` is not one of `model.full_parameter_access.NEEDS`.
    """
    needs = getattr(optimizer, "needs", None)
    if needs is not None and needs not in NEEDS:
        raise ValueError(f"{optimizer!r} declares needs={needs!r}; write one of {', '.join(map(repr, NEEDS))}, or none")
    return needs is not None


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of the optimizer's state on this rank, each once."""
    tensors = {
        id(value): value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return list(tensors.values())

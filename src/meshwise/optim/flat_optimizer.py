"""Build a torch optimizer over flat slices.

A rank owns slices of flat buffers, not tensors of the model. An elementwise optimizer gives the same numbers on slices
as on whole tensors. One that looks at rows, columns or the norm of a tensor does not: it declares what it needs and
asks for it (`model.logical_tensors`), or is refused where it is known.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwise.model.logical_tensors import NEEDS, LogicalTensors
from meshwise.optim.parameter_groups import IMPLEMENTATIONS

OptimizerClass = type[torch.optim.Optimizer]

WHOLE_TENSORS: Mapping[str, str] = {
    "Adafactor": "it factors the second moment of a matrix into rows and columns",
    "Muon": "it orthogonalises the momentum of a whole matrix",
    "LBFGS": "it takes inner products over the whole model and calls the loss several times a step",
    "SparseAdam": "it needs sparse gradients, and buckets are dense",
}
"""torch optimizers that slices would make wrong, and why."""


def flat_optimizer(
    optimizer: OptimizerClass,
    *,
    groups: Mapping[tuple[tuple[str, Any], ...], Sequence[nn.Parameter]],
    logical: LogicalTensors | None = None,
    **arguments: Any,
) -> torch.optim.Optimizer:
    """Build `optimizer` with one parameter group for each options, in this order, some perhaps empty on this rank.

    torch's fused implementation is chosen where the class has one and the arguments do not say otherwise: it reads
    and writes every buffer once.

    `logical`: access to whole parameters, given to a class that declares `needs`.

    Raises ValueError for what is no class of optimizers, for one that must see whole tensors without declaring it, and
    for arguments the class does not take.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ValueError(  # noqa: TRY004
            f"optimizer={optimizer!r} is no class of optimizers; give one, and its arguments beside it: "
            "parallelize(…, optimizer=torch.optim.AdamW, lr=3e-4)"
        )
    if base := next((base.__name__ for base in optimizer.__mro__ if base.__name__ in WHOLE_TENSORS), None):
        derived = "" if base == optimizer.__name__ else f", as a kind of {base},"
        raise ValueError(
            f"{optimizer.__name__}{derived} cannot run on slices of parameters: {WHOLE_TENSORS[base]}; use an "
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
    """Return whether an optimizer class declares that it needs whole parameters or norms of them.

    Raises ValueError for a `needs` with another value.
    """
    needs = getattr(optimizer, "needs", None)
    if needs is not None and needs not in NEEDS:
        raise ValueError(f"{optimizer!r} declares needs={needs!r}; write one of {', '.join(map(repr, NEEDS))}, or none")
    return needs is not None


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the optimizer's state on this rank, each tensor once."""
    tensors = {
        id(value): value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return list(tensors.values())

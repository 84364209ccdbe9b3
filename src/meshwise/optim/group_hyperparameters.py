"""Save and restore the hyperparameters of an optimizer's groups, by parameter name.

torch's `state_dict` numbers parameters and groups, so it fits only one plan. Names fit every plan."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def describe_groups(optimizer: torch.optim.Optimizer, *, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return each group of an optimizer as JSON: `names` of its parameters (as given) and `values` of hyperparameters.

    Raises ValueError for a hyperparameter that is no number, string, None, or list of these."""
    described = []
    for group, members in zip(optimizer.param_groups, names, strict=True):
        values = {key: _plain(key, value) for key, value in group.items() if key not in ("params", "names")}
        described.append({"names": list(members), "values": values})
    return described


def saved_groups(*, names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the saved hyperparameters of each group; {} for a group whose parameters were not trained.

    names: parameter names of each group now. saved: the groups of the checkpoint, from `describe_groups`.

    Raises ValueError if parameters that share a group now were saved with different hyperparameters."""
    by_name = {name: group["values"] for group in saved for name in group["names"]}
    found: list[Mapping[str, Any]] = []
    for members in names:
        known = [name for name in members if name in by_name]
        for name in known[1:]:
            if by_name[name] != by_name[known[0]]:
                raise ValueError(
                    f"{known[0]} and {name} share a group of the optimizer and were saved with {by_name[known[0]]} and "
                    f"{by_name[name]}; give them different optimizer options, as when they were saved"
                )
        found.append(by_name[known[0]] if known else {})
    return found


IMPLEMENTATIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Keys that choose an optimizer's implementation: not restored, since they depend on the device and the dtypes."""


def restore_groups(optimizer: torch.optim.Optimizer, *, values: Sequence[Mapping[str, Any]]) -> None:
    """Set the hyperparameters of each group, in order, to `values`; `IMPLEMENTATIONS` are left as they are."""
    for group, restored in zip(optimizer.param_groups, values, strict=True):
        for key, value in restored.items():
            if key in IMPLEMENTATIONS:
                continue
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(key, part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"the optimizer's {key} = {value!r} is of type {type(value).__name__}; a checkpoint keeps numbers")

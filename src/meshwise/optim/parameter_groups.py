"""The hyperparameters of an optimizer, by the parameters they are for.

torch's own `state_dict` numbers parameters and groups, so it fits one plan and one division into groups. Names fit all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def describe_groups(optimizer: torch.optim.Optimizer, *, names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer as JSON values; `names` are the parameter names of each group.

    Raises ValueError for a hyperparameter that JSON has no value for.
    """
    described = []
    for group, members in zip(optimizer.param_groups, names, strict=True):
        values = {key: _plain(key, value) for key, value in group.items() if key != "params"}
        described.append({"names": list(members), "values": values})
    return described


def saved_groups(*, names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the hyperparameters that the parameters of each group were saved with; none where they were not trained.

    Raises ValueError when parameters of one group were saved with different ones.
    """
    by_name = {name: group["values"] for group in saved for name in group["names"]}
    found: list[Mapping[str, Any]] = []
    for members in names:
        known = [name for name in members if name in by_name]
        for name in known[1:]:
            if by_name[name] != by_name[known[0]]:
                raise ValueError(
                    f"{known[0]} and {name} share a group of the optimizer and were saved with {by_name[known[0]]} and "
                    f"{by_name[name]}; give them different options again"
                )
        found.append(by_name[known[0]] if known else {})
    return found


IMPLEMENTATIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""What chooses how an optimizer computes: which of them there is hangs on the device and the dtypes that a rank has."""


def restore_groups(optimizer: torch.optim.Optimizer, *, values: Sequence[Mapping[str, Any]]) -> None:
    """Give every group its hyperparameters."""
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

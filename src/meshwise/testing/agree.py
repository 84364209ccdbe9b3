"""Check that a training under a plan and the same training on one process have equal figures (`agree`).

An outcome holds the figures to compare, by name: tensors and numbers in nested mappings and sequences.

    {"loss": 2.31, "grad_norm": 0.8, "gradients": {"embed.weight": Tensor, …}, "parameters": {…}}

Two outcomes agree when they hold the same names, and the relative difference of every pair of tensors (see
`difference`) is at most the bound. The tensors of one mapping or sequence are a family. The largest element of a family
sets the scale below which a value is only rounding. Each number is its own family."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshwise.testing.relative_difference import Difference, difference, largest_magnitude, rounding_floor

Outcome: TypeAlias = Any
"""Tensors and numbers in nested mappings and sequences; names are joined by ` · `."""
_SHOWN = 8


class Disagreement(AssertionError):
    """Error for two outcomes that differ by more than the bound, or do not hold the same names and shapes."""


def agree(parallel: Outcome, single: Outcome, *, bound: float) -> None:
    """Check that `parallel` equals `single`, the trusted side, up to the relative difference `bound`, such as 1e-9.

    Raises Disagreement with the names that only one side has. If there are none, it names the first tensor over the
    bound, in the order of `single`, and the index of its largest difference. Raises TypeError for other values."""
    ours, theirs = dict(_leaves(parallel)), dict(_leaves(single))
    if ours.keys() != theirs.keys():
        raise Disagreement(_names(ours, theirs))
    families: dict[str, float] = {}
    for name, (family, tensor) in theirs.items():
        shapes = tuple(ours[name][1].shape), tuple(tensor.shape)
        if shapes[0] != shapes[1]:
            raise Disagreement(f"{name} has shape {shapes[0]} in parallel and {shapes[1]} alone")
        families[family] = max(families.get(family, 0.0), largest_magnitude(tensor))
    found: list[tuple[str, Difference]] = []
    for name, (family, tensor) in theirs.items():
        least = rounding_floor(families[family], bound=bound, dtype=tensor.dtype)
        apart = difference(ours[name][1], tensor, floor=least)
        if apart.relative > bound:
            found.append((name, apart))
    if found:
        raise Disagreement(_report(found, bound, len(theirs)))


def _leaves(outcome: Outcome, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, Tensor]]]:
    """Yield (name, (name of its family, tensor)) for every tensor and number of an outcome."""
    if isinstance(outcome, Tensor):
        yield " · ".join(path), (" · ".join(path[:-1]), outcome)
    elif isinstance(outcome, bool | int | float):
        yield " · ".join(path), (" · ".join(path), torch.tensor(float(outcome), dtype=torch.float64))
    elif isinstance(outcome, Mapping):
        for name, part in outcome.items():
            yield from _leaves(part, (*path, str(name)))
    elif isinstance(outcome, Sequence) and not isinstance(outcome, str):
        for index, part in enumerate(outcome):
            yield from _leaves(part, (*path, str(index)))
    else:
        raise TypeError(
            f"{' · '.join(path) or 'the outcome'} is a {type(outcome).__name__}; an outcome holds tensors "
            "and numbers, in mappings and sequences"
        )


def _names(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    missing = [name for name in theirs if name not in ours]
    extra = [name for name in ours if name not in theirs]
    lines = [
        f"  {side}: {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
        for side, names in (("only alone", missing), ("only in parallel", extra))
        if names
    ]
    return "\n".join(["the two outcomes do not hold the same tensors", *lines])


def _report(found: list[tuple[str, Difference]], bound: float, compared: int) -> str:
    name, first = found[0]
    width = max(len(name) for name, _ in found[:_SHOWN])
    where = f" at {list(first.index)}" if first.index else ""
    lines = [
        f"{name}: relative difference {first.relative:.3g}, bound {bound:.3g}",
        f"  {first.value:.17g} in parallel and {first.expected:.17g} alone{where}",
        f"  {len(found)} of {compared} tensors differ, the first of them:",
        *(f"    {name:<{width}}  {apart.relative:.3g}" for name, apart in found[:_SHOWN]),
    ]
    return "\n".join(lines)

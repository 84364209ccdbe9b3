"""Find by a trial whether an optimizer class treats slices of parameters as it treats whole parameters.

A rank updates flat slices. They may hold the end of one parameter and the beginning of the next, under every plan. An
elementwise optimizer computes the same on both. A class that takes norms, rows or `p.ndim` of a tensor does not. So
the class is tried on a matrix and a vector of 17 elements in all, and on two flat slices of the same elements.

    whole     | matrix (3, 4)               | vector (5,) |
    slices    | slice of 7       | slice of 10             |
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_SHAPES = ((3, 4), (5,))
_CUTS = (7, 10)
_STEPS = 3
_BOUND = 1e-3
"""Largest difference of two updates that rounding explains, relative to the largest update."""


def slice_difference(optimizer: type[torch.optim.Optimizer], *, arguments: Mapping[str, Any]) -> str:
    """Return as text how updates of slices differ from updates of whole parameters; "" if they do not.

    Return "" too for a class of `torch.optim`, and for a class whose steps on whole parameters raise an error.
    Torch's CPU generator is left as it was.
    """
    if optimizer.__module__.partition(".")[0] == "torch":
        return ""
    start = torch.linspace(-1.0, 1.5, sum(_CUTS))
    with torch.random.fork_rng(devices=[]):
        try:
            parts = zip(start.split([math.prod(shape) for shape in _SHAPES]), _SHAPES, strict=True)
            whole = _trained(optimizer, [part.view(shape) for part, shape in parts], arguments)
        except Exception:  # noqa: BLE001 - a user's class may fail in any way
            return ""
    with torch.random.fork_rng(devices=[]):
        try:
            sliced = _trained(optimizer, list(start.split(_CUTS)), arguments)
        except Exception as error:  # noqa: BLE001
            return f"in a trial its step on slices raised {type(error).__name__}: {error}"
    apart, moved = float((sliced - whole).abs().max()), float((whole - start).abs().max())
    if not bool(whole.isfinite().all()) or apart <= _BOUND * moved:
        return ""
    return f"in a trial its updates of slices were off by up to {apart / max(moved, 1e-30):.0%}"


def _trained(kind: type[torch.optim.Optimizer], values: Sequence[Tensor], arguments: Mapping[str, Any]) -> Tensor:
    """Return all elements after a few steps from `values`, with gradients that depend on the element and the step."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(value.clone()) for value in values]
    tried = kind(parameters, **arguments)
    for step in range(_STEPS):
        first = 0
        for parameter in parameters:
            numbers = torch.arange(first, first + parameter.numel(), dtype=torch.float32)
            parameter.grad = torch.cos(numbers * (step + 1)).view_as(parameter)
            first += parameter.numel()
        tried.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])

"""Muon: momentum whose matrix is replaced by a nearly orthogonal one (Jordan, 2024; Liu et al., arXiv 2502.16982).

Each matrix is orthogonalised on one rank, by a Newton-Schulz iteration. torch.optim.Muon iterates in bfloat16, where a
difference of 1e-16 in a gradient may flip a rounding, so that two plans differ by 1e-2. Here the iteration runs in the
dtype of the gradient; `dtype="bfloat16"` gives torch's numbers."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwise.model.full_parameter_access import LogicalTensors
from meshwise.optim.whole_parameter_optimizer import WholeParameterOptimizer

RATE_FACTORS: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Factor of the rate by `adjust_lr_fn`. With `match_rms_adamw` the rate and weight decay of AdamW fit."""


def orthogonalize(matrix: Tensor, *, steps: int, coefficients: tuple[float, float, float], eps: float) -> Tensor:
    """Return U S Vᵀ for a matrix U D Vᵀ, (rows, columns), with the diagonal of S between about 0.7 and 1.2.

    A step is X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X, with the coefficients (a, b, c)."""
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(WholeParameterOptimizer):
    """Muon for parameters of two or more dims; the dims after the first are flattened. State: `momentum_buffer`.

    Takes the arguments of torch.optim.Muon, and `dtype`: the name of the dtype in which matrices travel and are
    orthogonalised, None for the dtype of the gradient. Raises ValueError for a parameter with fewer dims."""

    needs = "matrices"
    DEFAULTS: Mapping[str, Any] = {
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "ns_steps": 5,
        "eps": 1e-7,
        "adjust_lr_fn": "original",
        "dtype": None,
    }

    def __init__(self, params: Iterable[Any], *, logical: LogicalTensors, **arguments: Any) -> None:
        super().__init__(params, logical=logical, **arguments)
        if self.defaults["adjust_lr_fn"] not in RATE_FACTORS:
            how = self.defaults["adjust_lr_fn"]
            raise ValueError(f"adjust_lr_fn={how!r}; write one of {', '.join(RATE_FACTORS)}")
        for part in (part for group in self.param_groups for p in group["params"] for part in logical.parts(p)):
            if len(part.shape) < 2:
                raise ValueError(
                    f"Muon cannot update {part.name!r} of shape {part.shape}: it is no matrix. Give vectors a second "
                    'optimizer: optimizer=Several, optimizers={"hidden": (Muon, {"lr": 0.02}), "rest": '
                    '(torch.optim.AdamW, {"lr": 3e-4})}; in a job, rest = {name = "AdamW", lr = 3e-4}'
                )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - no closure under a plan
        """Update all parameters."""
        for group in self.param_groups:
            updates = {}
            for p in group["params"]:
                momentum = self.kept(p, key="momentum_buffer").lerp_(p.grad, 1 - group["momentum"])
                updates[p] = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()
            dtype = None if group["dtype"] is None else getattr(torch, group["dtype"])
            how = {"steps": group["ns_steps"], "coefficients": group["ns_coefficients"], "eps": group["eps"]}

            def orthogonal(_: str, full: Tensor, how: Any = how) -> Tensor:
                return orthogonalize(full.flatten(1), **how).reshape(full.shape)

            self.logical.map_whole(updates, groups=[group], function=orthogonal, dtype=dtype)
            for p, update in updates.items():
                p.mul_(1 - group["lr"] * group["weight_decay"])
                for part in self.logical.parts(p):
                    factor = RATE_FACTORS[group["adjust_lr_fn"]](part.shape[0], math.prod(part.shape[1:]))
                    here = slice(part.start, part.stop)
                    p.view(-1)[here].add_(update.view(-1)[here], alpha=-group["lr"] * factor)

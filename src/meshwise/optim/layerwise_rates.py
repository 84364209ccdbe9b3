"""LARS and LAMB: a rate for each parameter, from the norms of the whole parameter and of its update.

    | LARS (You et al., arXiv 1708.03888)   v <- momentum v + lr r (g + decay w), w <- w - v
    |                                       r = trust |w| / (|g| + decay |w|)
    | LAMB (You et al., arXiv 1904.00962)   w <- w - lr r u, where u = m̂ / (sqrt(v̂) + eps) + decay w
    |                                       r = |w| / |u|

Under a plan a rank updates slices, and the norm of a slice is another number. So the squared norms of all parameters
are summed in an all-reduce, one fp64 number each. r is 1 where a norm is 0, and for parameters with fewer than two
dims, as in the authors' own code; `vectors=True` adapts these too."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.optim.whole_parameter_optimizer import WholeParameterOptimizer


class _LayerwiseRates(WholeParameterOptimizer):
    needs = "norms"

    def _adapt(
        self,
        updates: Mapping[nn.Parameter, Tensor],
        *,
        measured: Mapping[nn.Parameter, Tensor],
        factor: Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor],
    ) -> None:
        """Multiply each update by `factor(norm of the parameter, norm of measured, group)`, fp64 (two all-reduces)."""
        lengths = self.logical.squared_norms({p: p.detach() for p in updates})
        squares = self.logical.squared_norms(measured)
        for group, p in self._pairs():
            for part in self.logical.parts(p):
                if len(part.shape) > 1 or group["vectors"]:
                    length, norm = lengths[part.name].sqrt(), squares[part.name].sqrt()
                    ratio = torch.where((length > 0) & (norm > 0), factor(length, norm, group), 1.0)
                    updates[p].view(-1)[part.start : part.stop].mul_(ratio.to(p.dtype))

    def _pairs(self) -> list[tuple[Any, Any]]:
        """Return (group, slice) of all slices."""
        return [(group, p) for group in self.param_groups for p in group["params"]]


class LARS(_LayerwiseRates):
    """SGD with momentum and layer-wise rates. State: `momentum_buffer`."""

    DEFAULTS: Mapping[str, Any] = {
        "lr": 1.0,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "trust": 0.001,
        "vectors": False,
    }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - no closure under a plan
        """Update all parameters."""
        updates = {p: p.grad.add(p, alpha=group["weight_decay"]) for group, p in self._pairs()}
        self._adapt(
            updates,
            measured={p: p.grad for p in updates},
            factor=lambda length, norm, group: group["trust"] * length / (norm + group["weight_decay"] * length),
        )
        for group, p in self._pairs():
            buffer = self.kept(p, key="momentum_buffer").mul_(group["momentum"])
            p.sub_(buffer.add_(updates[p], alpha=group["lr"]))


class LAMB(_LayerwiseRates):
    """Adam with decoupled decay and layer-wise rates. State: `exp_avg`, `exp_avg_sq`, `step`."""

    DEFAULTS: Mapping[str, Any] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "vectors": False,
    }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - no closure under a plan
        """Update all parameters."""
        updates = {}
        for group, p in self._pairs():
            state, (first, second) = self.state[p], group["betas"]
            state["step"] = state.get("step", 0) + 1
            mean = self.kept(p, key="exp_avg").lerp_(p.grad, 1 - first)
            square = self.kept(p, key="exp_avg_sq").mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
            root = (square / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
            updates[p] = (mean / (1 - first ** state["step"])).div_(root).add_(p, alpha=group["weight_decay"])
        self._adapt(updates, measured=updates, factor=lambda length, norm, _: length / norm)
        for group, p in self._pairs():
            p.sub_(updates[p], alpha=group["lr"])

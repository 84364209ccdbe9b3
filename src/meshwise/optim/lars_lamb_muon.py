"""Optimizers that need norms or matrices of whole parameters: LARS, LAMB and Muon.

Muon replaces the matrix of a momentum by a nearly orthogonal one (Jordan, 2024; Liu et al., arXiv 2502.16982). Each
matrix is orthogonalised on one rank, by a Newton-Schulz iteration in the dtype of the gradient. In bfloat16, as in
torch.optim.Muon, a difference of 1e-16 may flip a rounding, so that two plans differ by 1e-2.

LARS and LAMB have a rate for each parameter, from the norms of the whole parameter and of its update:

    | LARS (You et al., arXiv 1708.03888)   v <- momentum v + lr r (g + decay w), w <- w - v
    |                                       r = trust |w| / (|g| + decay |w|)
    | LAMB (You et al., arXiv 1904.00962)   w <- w - lr r u, where u = m̂ / (sqrt(v̂) + eps) + decay w
    |                                       r = |w| / |u|

Under a plan a rank updates slices, and the norm of a slice is another number. So the squared norms of all parameters
are summed in an all-reduce, one fp64 number each. r is 1 where a norm is 0, and for parameters with fewer than two
dims, as in the authors' own code. With `vectors=True`, r is computed for these parameters too."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.model.whole_parameters import LogicalTensors, SliceTensors


class WholeParameterOptimizer(torch.optim.Optimizer):
    """Optimizer with the keyword arguments and defaults of `DEFAULTS`; every rank calls `step`, without a closure."""

    DEFAULTS: Mapping[str, Any] = {}

    def __init__(self, params: Iterable[Any], *, logical: LogicalTensors, **arguments: Any) -> None:
        name = type(self).__name__
        if unknown := sorted(set(arguments) - set(self.DEFAULTS)):
            raise ValueError(f"{name} takes no {', '.join(unknown)}; it takes {', '.join(self.DEFAULTS)}")
        super().__init__(params, {**self.DEFAULTS, **arguments})
        if not self.defaults["lr"] >= 0:
            raise ValueError(f"Invalid learning rate: {self.defaults['lr']}; give a rate of 0 or above")
        self.logical = logical

    def state_tensor(self, parameter: nn.Parameter, *, key: str) -> Tensor:
        """Return the state `key` of a parameter, of the parameter's shape; zeros the first time."""
        state = self.state[parameter]
        if key not in state:
            state[key] = torch.zeros_like(parameter, requires_grad=False)
        found: Tensor = state[key]
        return found


RATE_FACTORS: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""Factor of the rate, by the value of `adjust_lr_fn`. With `match_rms_adamw`, AdamW's rate and weight decay fit."""


def orthogonalize(matrix: Tensor, *, steps: int, coefficients: tuple[float, float, float], eps: float) -> Tensor:
    """Return U S Vᵀ for a matrix U D Vᵀ, (rows, columns), with the diagonal of S between about 0.7 and 1.2.

    First X is divided by max(norm, eps). A step is X <- a X + b (X Xᵀ) X + c (X Xᵀ)² X; `coefficients`: (a, b, c)."""
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

    Takes the arguments of torch.optim.Muon, and `dtype`: name of the dtype in which matrices are sent and
    orthogonalised. None: the dtype of the gradient. Raises ValueError for a parameter with fewer dims."""

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
        if (how := self.defaults["adjust_lr_fn"]) not in RATE_FACTORS:
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
            for p in [p for p in group["params"] if p.grad is not None]:
                momentum = self.state_tensor(p, key="momentum_buffer").lerp_(p.grad, 1 - group["momentum"])
                updates[p] = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum.clone()
            dtype = None if group["dtype"] is None else getattr(torch, group["dtype"])
            how = {"steps": group["ns_steps"], "coefficients": group["ns_coefficients"], "eps": group["eps"]}

            def orthogonal(_: nn.Parameter, full: Tensor, how: Any = how) -> Tensor:
                return orthogonalize(full.flatten(1), **how).reshape(full.shape)

            self.logical.map_whole(updates, groups=[group], function=orthogonal, dtype=dtype)
            for p, update in updates.items():
                p.mul_(1 - group["lr"] * group["weight_decay"])
                for part in self.logical.parts(p):
                    factor = RATE_FACTORS[group["adjust_lr_fn"]](part.shape[0], math.prod(part.shape[1:]))
                    here = slice(part.start, part.stop)
                    p.view(-1)[here].add_(update.view(-1)[here], alpha=-group["lr"] * factor)


class LayerwiseRates(WholeParameterOptimizer):
    """Optimizer whose update of a parameter is multiplied by a ratio of norms."""

    needs = "norms"

    def ratios(self, measured: SliceTensors) -> dict[str, Tensor]:
        """Return the ratio (`factor`) of each parameter by name, fp64 scalars (two all-reduces); 1 where a norm is 0.

        `measured`: by slice, the tensor whose norm is compared with the parameter's, such as the update."""
        lengths = self.logical.squared_norms({p: p.detach() for p in measured})
        squares = self.logical.squared_norms(measured)
        found: dict[str, Tensor] = {}
        for group in self.param_groups:
            if not (names := self.names(group)):
                continue
            length, norm = (torch.stack([each[name] for name in names]).sqrt() for each in (lengths, squares))
            ratios = torch.where((length > 0) & (norm > 0), self.factor(length, norm=norm, group=group), 1.0)
            found |= dict(zip(names, ratios, strict=True))
        return found

    def factor(self, length: Tensor, *, norm: Tensor, group: Mapping[str, Any]) -> Tensor:  # noqa: ARG002 - see LARS
        """Return the ratios, (parameters,), from norms of parameters (`length`) and of measured tensors (`norm`)."""
        return length / norm

    def multiply_by_ratios(self, updates: SliceTensors, *, ratios: Mapping[str, Tensor]) -> None:
        """Multiply the update of each matrix, and with `vectors` of each parameter, by its ratio."""
        for group, p in self.pairs():
            for part in self.logical.parts(p):
                if len(part.shape) > 1 or group["vectors"]:
                    updates[p].view(-1)[part.start : part.stop].mul_(ratios[part.name].to(p.dtype))

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return (group, slice) of all slices that have a gradient."""
        return [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]

    def names(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of the parameters of a group, on all ranks."""
        own = [p for p in group["params"] if p.grad is not None]
        return group.get("names") or [part.name for p in own for part in self.logical.parts(p)]


class LARS(LayerwiseRates):
    """SGD with momentum and layer-wise rates. State: `momentum_buffer`."""

    DEFAULTS: Mapping[str, Any] = {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.0, "trust": 0.001, "vectors": False}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - no closure under a plan
        """Update all parameters."""
        updates = {p: p.grad.add(p, alpha=group["weight_decay"]) for group, p in self.pairs()}
        self.multiply_by_ratios(updates, ratios=self.ratios({p: p.grad for p in updates}))
        for group, p in self.pairs():
            buffer = self.state_tensor(p, key="momentum_buffer").mul_(group["momentum"])
            p.sub_(buffer.add_(updates[p], alpha=group["lr"]))

    def factor(self, length: Tensor, *, norm: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return the ratios, (parameters,), from norms of parameters (`length`) and of gradients (`norm`)."""
        return length.mul(group["trust"]).div(norm + group["weight_decay"] * length)


class MomentOptimizer(LayerwiseRates):
    """Optimizer with momentum and variance, as Adam. State: `exp_avg`, `exp_avg_sq`; its groups count `step`."""

    DEFAULTS: Mapping[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

    @property
    def steps(self) -> int:
        """Number of steps since the state was made; 0 after a load without state."""
        slices = any(group["params"] for group in self.param_groups)
        return int(self.param_groups[0].get("step", 0)) if self.state or not slices else 0

    def variance_updates(self, step: int) -> int:
        """Return how many of the first `step` steps change the variance: here all."""
        return step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - no closure under a plan
        """Update all parameters."""
        step = self.steps + 1
        refreshed = self.variance_updates(step)
        self.update_moments(step)
        updates = {}
        for group, p in self.pairs():
            mean, square = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
            root = corrected_root(square, refreshed=refreshed, group=group)
            update = (mean / (1 - group["betas"][0] ** step)).div_(root)
            if refreshed < step:
                update.clamp_(-group["limit"], group["limit"]).masked_fill_(square == 0, 0)
            updates[p] = update.add_(p, alpha=group["weight_decay"])
        self.scale_updates(updates, step=step)
        for group, p in self.pairs():
            p.sub_(updates[p], alpha=group.get("rate", group["lr"]))
        for group in self.param_groups:
            group["step"] = step

    def update_moments(self, step: int) -> None:
        """Update the momentum by the gradient, and the variance if step number `step` changes it."""
        for group, p in [(own, p) for own in self.param_groups for p in own["params"]]:
            first, second = group["betas"]
            mean, square = (self.state_tensor(p, key=key) for key in ("exp_avg", "exp_avg_sq"))
            if p.grad is None:
                continue
            mean.lerp_(p.grad, 1 - first)
            if self.variance_updates(step) > self.variance_updates(step - 1):
                square.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)

    def scale_updates(self, updates: SliceTensors, *, step: int) -> None:
        """Multiply the updates by ratios, in subclasses; this class does nothing."""


def corrected_root(square: Tensor, *, refreshed: int, group: Mapping[str, Any]) -> Tensor:
    """Return sqrt(v̂) + eps for a variance that `refreshed` steps have changed; v̂ has Adam's bias correction."""
    return square.div(1 - group["betas"][1] ** refreshed).sqrt_().add_(group["eps"])


class LAMB(MomentOptimizer):
    """Adam with decoupled decay and layer-wise rates."""

    DEFAULTS: Mapping[str, Any] = {**MomentOptimizer.DEFAULTS, "eps": 1e-6, "vectors": False}

    def scale_updates(self, updates: SliceTensors, *, step: int) -> None:  # noqa: ARG002 - all steps are alike
        """Multiply the updates by |w| / |u|."""
        self.multiply_by_ratios(updates, ratios=self.ratios(updates))

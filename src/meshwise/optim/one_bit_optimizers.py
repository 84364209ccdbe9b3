"""Optimizers that send momenta through a codec instead of gradients: 1-bit Adam, 1-bit LAMB and 0/1 Adam.

A step is exact or encoded. m: momentum, v: variance, g: the mean gradient, g_r: the term of replica r (of R) in g. C:
the codec. e_r and e: the codec's errors in earlier steps, on replica r and on the owner of a shard:

    | exact      m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g²
    | encoded    m <- C(e + Σ C(e_r + beta1 m / R + (1 - beta1) g_r)),   v stays
    | both       w <- w - lr (m̂ / (sqrt(v̂) + eps) + decay w)

docs/synchronisation.md has the exact steps, the local steps under `sync=momenta`, and the paper of each class. m̂ and v̂
have Adam's bias correction. A sign cannot be 0, so an element with small gradients gets an m as large as the mean of
its block. So from the first encoded step on, m̂ / (sqrt(v̂) + eps) is clamped to ±`limit`, and 0 if v is 0.

OneBitLAMB multiplies an update by c f. c: the mean of LAMB's ratios in the warm-up. f: the largest sqrt(v̂) / sqrt(û) in
the parameter, where each step changes the variance u by the gradient that follows from the momenta."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.model.whole_parameters import LogicalTensors, SliceTensors
from meshwise.optim.lars_lamb_muon import LAMB, MomentOptimizer, corrected_root
from meshwise.plan.plan_keys import Wire


class OneBitAdam(MomentOptimizer):
    """AdamW for `warmup` steps, then with a frozen variance and encoded momenta."""

    needs = "replicas"
    DEFAULTS: Mapping[str, Any] = {**MomentOptimizer.DEFAULTS, "warmup": 100, "codec": "1bit", "limit": 1.0}

    def __init__(self, params: Iterable[Any], *, logical: LogicalTensors, **arguments: Any) -> None:
        super().__init__(params, logical=logical, **arguments)
        codec = self.defaults["codec"]
        if codec != "none" and (type(codec) is not str or Wire.parse(codec).codec in ("none", "powersgd")):
            raise ValueError(f"codec={codec!r} does not encode momenta; write codec='1bit', or 'none' for exact sums")
        for key in ("warmup", "kappa", "doubling"):
            if self.defaults.get(key, 1) < 1:
                raise ValueError(f"{key}={self.defaults[key]} is no number of steps; write {key}={self.DEFAULTS[key]}")

    def variance_updates(self, step: int) -> int:
        """Return how many of the first `step` steps change the variance."""
        return min(step, int(self.defaults["warmup"]))

    @property
    def keeps_gradients(self) -> bool:
        """True if the next step is encoded, and so needs the gradient of each replica instead of their sum."""
        return self._encodes(self.steps + 1)

    def _encodes(self, step: int) -> bool:
        return self.defaults["codec"] != "none" and self.variance_updates(step) == self.variance_updates(step - 1)

    def update_moments(self, step: int) -> None:
        """Update momentum and variance by the gradient; in an encoded step exchange momenta instead."""
        if not self._encodes(step):
            super().update_moments(step)
            return
        momenta = {p: self.state_tensor(p, key="exp_avg") for _, p in self.pairs()}
        betas = {name: group["betas"][0] for group in self.param_groups for name in self.names(group)}
        self.logical.exchange(momenta, betas=betas, codec=self.defaults["codec"])


class ZeroOneAdam(OneBitAdam):
    """AdamW with encoded momenta, except in exact steps. These become rarer, and only they change the variance."""

    takes_local_steps = True
    DEFAULTS: Mapping[str, Any] = {**OneBitAdam.DEFAULTS, "warmup": 100_000, "kappa": 16, "doubling": 32_768}

    def variance_updates(self, step: int) -> int:
        """Return how many of the first `step` steps change the variance."""
        count, due = 0, 1
        while due <= min(step, self.defaults["warmup"]):
            due += 2 ** (count // self.defaults["kappa"])
            count += 1
        return count

    def _encodes(self, step: int) -> bool:
        return super()._encodes(step) or (self.logical.every > 0 and self.param_groups[0].get("local", 0) > 0)

    def update_moments(self, step: int) -> None:
        """Update momenta as `OneBitAdam`, or under `sync=momenta` each replica's own, with exchanges at intervals."""
        for state in self.state.values() if not self.logical.every else ():
            if "error" in state:  # of a checkpoint of replicas with local steps
                state["exp_avg"].add_(state.pop("error")).add_(state.pop("error_owner"))
        is_local = self.logical.every > 0 and self._encodes(step)
        begins = step == 1 or not self.param_groups[0].get("local")
        after = max(0, step - self.defaults["warmup"])
        longest = 2 ** min(32, max(0, after - 1) // self.defaults["doubling"])
        ends = is_local and after % min(self.logical.every, longest) == 0
        if not is_local:
            super().update_moments(step)
        for group in self.param_groups:  # sum of the rates since the last exchange, rate of this update
            group["rates"] = group["lr"] + (0.0 if begins else group["rates"])
            group["rate"] = group["rates"] if ends else group["lr"]
            group["local"] = group.get("local", 0) + 1 if is_local and not ends else 0
        for group, p in self.pairs() if is_local else ():
            mean, average, agreed = (self.state_tensor(p, key=key) for key in ("exp_avg", "exp_avg_mean", "agreed"))
            mean.lerp_(p.grad * self.logical.replicas, 1 - group["betas"][0])
            average.lerp_(mean, group["lr"] / group["rates"] if group["rates"] else 1.0)
            if begins:
                agreed.copy_(p)
        if ends:
            kept = ("exp_avg_mean", "error", "error_owner")
            means, *lost = ({p: self.state_tensor(p, key=key) for _, p in self.pairs()} for key in kept)
            for (group, p), each in itertools.product(self.pairs(), lost):  # errors are of rates times momenta
                each[p].mul_(group["sent"] / group["rates"] if group.get("sent") and group["rates"] else 1.0)
            self.logical.exchange(means, *lost, betas={}, codec=self.defaults["codec"].replace("none", "auto"))
            for _, p in self.pairs():
                self.state[p]["exp_avg"].copy_(means[p])
                p.copy_(self.state[p]["agreed"])
            for group in self.param_groups:
                group["sent"] = group["rates"]


class OneBitLAMB(OneBitAdam):
    """LAMB for `warmup` steps, then with a frozen variance and encoded momenta. Further state: `exp_avg_sq_fresh`."""

    DEFAULTS: Mapping[str, Any] = {**OneBitAdam.DEFAULTS, **LAMB.DEFAULTS, "beta3": 0.9, "factors": (0.5, 4.0, 0.1)}

    def update_moments(self, step: int) -> None:
        """Update momentum and both variances; `exp_avg_sq_fresh` by the gradient that the new momentum implies."""
        before = {p: self.state_tensor(p, key="exp_avg").clone() for _, p in self.pairs()}
        super().update_moments(step)
        for group, p in self.pairs():
            first, second = group["betas"]
            gradient = (self.state[p]["exp_avg"] - first * before[p]) / (1 - first)
            self.state_tensor(p, key="exp_avg_sq_fresh").mul_(second).addcmul_(gradient, gradient, value=1 - second)

    def scale_updates(self, updates: SliceTensors, *, step: int) -> None:
        """Multiply updates by LAMB's ratios, and average the ratios; after the warm-up, by the average and a factor."""
        refreshed = self.variance_updates(step)
        if refreshed == step:
            found = self.ratios(updates)
        else:
            growth: dict[nn.Parameter, Tensor] = {}
            for group, p in self.pairs():  # sqrt(v̂) / sqrt(û), 0 where v is 0; u is `exp_avg_sq_fresh`
                square, fresh = self.state[p]["exp_avg_sq"], self.state[p]["exp_avg_sq_fresh"]
                growth[p] = corrected_root(square, refreshed=refreshed, group=group)
                growth[p].div_(corrected_root(fresh, refreshed=step, group=group)).masked_fill_(square == 0, 0)
            found = {name: it.sqrt() for name, it in self.logical.squared_norms(growth, order=math.inf).items()}
        for group in self.param_groups:
            names, beta, (low, high, change) = self.names(group), group["beta3"], group["factors"]
            now = torch.stack([found[name] for name in names])
            # (2, parameters): the average of the ratios, and the last factors
            kept = torch.as_tensor(group.get("ratios", 0.0), dtype=now.dtype, device=now.device).expand(2, len(names))
            if refreshed == step:
                group["ratios"] = torch.stack([kept[0].lerp(now, 1 - beta), torch.ones_like(now)])
            else:
                factor = now.clamp(low, high).clamp(kept[1] * (1 - change), kept[1] * (1 + change))
                group["ratios"] = torch.stack([kept[0], factor])
                found |= dict(zip(names, kept[0] / (1 - beta**refreshed) * factor, strict=True))
        self.multiply_by_ratios(updates, ratios=found)

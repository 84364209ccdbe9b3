"""Optimizers that send momenta through a codec instead of gradients: 1-bit Adam, 1-bit LAMB and 0/1 Adam.

A step is exact or encoded. m: momentum, v: variance, g: the mean gradient, g_r: what replica r of R adds to g. C is the
codec. e_r and e are what it lost in earlier steps, on replica r and on the owner of a shard:

    | exact      m <- beta1 m + (1 - beta1) g,   v <- beta2 v + (1 - beta2) g²
    | encoded    m <- C(e + Σ C(e_r + beta1 m / R + (1 - beta1) g_r)),   v stays
    | both       w <- w - lr (m̂ / (sqrt(v̂) + eps) + decay w)

    | class         exact steps                                                     paper
    | OneBitAdam    the first `warmup`; they are AdamW's                            Tang et al., arXiv 2102.02888
    | OneBitLAMB    the first `warmup`; they are LAMB's                             Li et al., arXiv 2104.06069
    | ZeroOneAdam   up to `warmup`: `kappa` times the next, then every 2nd, 4th …   Lu et al., arXiv 2202.06009

m̂ and v̂ are corrected for their first zeros. A sign cannot be 0, so an element with small gradients gets the m of its
block of the codec. So from the first encoded step on, m̂ / (sqrt(v̂) + eps) is held within ±`limit`, and is 0 if v is 0.
With `codec="none"` all gradients are summed exactly. ZeroOneAdam takes no local steps: replicas agree after each step.

OneBitLAMB multiplies an update by c f. c: the mean of LAMB's ratios in the warm-up, weighted by `beta3`. f: the
largest sqrt(v̂) / sqrt(û) in the parameter. u is a variance that changes in each step, by the gradient that the momenta
imply. `factors` has the least and the largest f, and its largest change in a step."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.model.full_parameter_access import LogicalTensors, SliceTensors
from meshwise.optim.large_batch_optimizers import LAMB, MomentOptimizer, root
from meshwise.plan.plan_keys import Wire


class OneBitAdam(MomentOptimizer):
    """AdamW for `warmup` steps, then with a frozen variance and encoded momenta."""

    needs = "replicas"
    DEFAULTS: Mapping[str, Any] = {**MomentOptimizer.DEFAULTS, "warmup": 100, "codec": "1bit", "limit": 1.0}

    def __init__(self, params: Iterable[Any], *, logical: LogicalTensors, **arguments: Any) -> None:
        super().__init__(params, logical=logical, **arguments)
        codec, warmup = self.defaults["codec"], self.defaults["warmup"]
        if codec != "none" and Wire.parse(codec).codec in ("none", "powersgd"):
            raise ValueError(f"codec={codec!r} does not encode momenta; write codec='1bit', or 'none' for whole ones")
        if warmup < 1:
            raise ValueError(f"warmup={warmup} leaves the variance 0; write warmup=100, about as for the learning rate")

    def refreshes(self, step: int) -> int:
        """Return how many of the first `step` steps change the variance."""
        return min(step, int(self.defaults["warmup"]))

    @property
    def keeps_gradients(self) -> bool:
        """True if the next step is encoded: it needs the gradient of each replica, not their sum."""
        return self._encodes(self.steps + 1)

    def _encodes(self, step: int) -> bool:
        return self.defaults["codec"] != "none" and self.refreshes(step) == self.refreshes(step - 1)

    def move(self, step: int) -> None:
        """Move momentum and variance by the gradient; in an encoded step exchange momenta instead."""
        if not self._encodes(step):
            super().move(step)
            return
        momenta = {p: self.kept(p, key="exp_avg") for _, p in self.pairs()}
        betas = {name: group["betas"][0] for group in self.param_groups for name in self.names(group)}
        self.logical.exchange_momenta(momenta, betas=betas, codec=self.defaults["codec"])


class ZeroOneAdam(OneBitAdam):
    """Adam with encoded momenta, except in ever rarer steps that change the variance."""

    DEFAULTS: Mapping[str, Any] = {**OneBitAdam.DEFAULTS, "warmup": 100_000, "kappa": 16}

    def refreshes(self, step: int) -> int:
        """Return how many of the first `step` steps change the variance."""
        count, due = 0, 1
        while due <= min(step, self.defaults["warmup"]):
            due += 2 ** (count // self.defaults["kappa"])
            count += 1
        return count


class OneBitLAMB(OneBitAdam):
    """LAMB for `warmup` steps, then with a frozen variance and encoded momenta. State: also `exp_avg_sq_fresh`."""

    DEFAULTS: Mapping[str, Any] = {**OneBitAdam.DEFAULTS, **LAMB.DEFAULTS, "beta3": 0.9, "factors": (0.5, 4.0, 0.1)}

    def move(self, step: int) -> None:
        """Move momentum and variances; the fresh one by the gradient that the momenta before and after imply."""
        before = {p: self.kept(p, key="exp_avg").clone() for _, p in self.pairs()}
        super().move(step)
        for group, p in self.pairs():
            first, second = group["betas"]
            gradient = (self.state[p]["exp_avg"] - first * before[p]) / (1 - first)
            self.kept(p, key="exp_avg_sq_fresh").mul_(second).addcmul_(gradient, gradient, value=1 - second)

    def rate(self, updates: SliceTensors, *, step: int) -> None:
        """Multiply the updates by LAMB's ratios, and average these; after the warm-up by the average and a factor."""
        refreshed = self.refreshes(step)
        if refreshed == step:
            found = self.ratios(updates)
        else:
            growth = {p: self._growth(group, p, refreshed, step) for group, p in self.pairs()}
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
        self.adapt(updates, ratios=found)

    def _growth(self, group: Mapping[str, Any], p: nn.Parameter, refreshed: int, step: int) -> Tensor:
        """Return sqrt(v̂) / sqrt(û) of each element, 0 where v is 0; u is `exp_avg_sq_fresh`."""
        square, fresh = self.state[p]["exp_avg_sq"], self.state[p]["exp_avg_sq_fresh"]
        frozen, now = root(square, refreshed=refreshed, group=group), root(fresh, refreshed=step, group=group)
        return frozen.div_(now).masked_fill_(square == 0, 0)

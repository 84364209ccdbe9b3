"""Compute LayerNorm, RMSNorm and batch norms over features that are split over ranks.

LayerNorm needs the mean and the variance over all features of a token, but a rank has only some features. From sums of
squares the variance would be inexact where the mean is large. So each rank sends the mean and variance of its own
features, which are combined exactly (Chan, Golub and LeVeque, 1979). It sends 2 numbers per token in the forward
and 2 in the backward. RMSNorm sends 1 and 1, because it needs only the mean of squares.

    x̂ = (x - mean) / σ    dx = (g - mean(g) - x̂ · mean(g · x̂)) / σ,  g = dy · weight    RMSNorm: no mean, mean(g)"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwise.comm.api.world import World
from meshwise.model.torch_private import needed_gradients
from meshwise.tensor.core.part import Norm
from meshwise.tensor.core.split_context import BoundToRank
from meshwise.tensor.schemes import Axes


@dataclass(frozen=True)
class SplitNorm(BoundToRank):
    """LayerNorm or RMSNorm on this rank: its formula, the axes that split the features, and each rank's size."""

    world: World
    axes: Axes
    sizes: tuple[int, ...]
    norm: Norm

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the normalised `x`, (…, local features), in its dtype; `weight` and `bias` are this rank's part."""
        wide = x.to(self.norm.statistics or (x.dtype if x.element_size() >= 4 else torch.float32))
        if wide.dtype == x.dtype or self.norm.centred:
            result: Tensor = _Normalise.apply(wide, weight, bias, self)
            return result.to(x.dtype)
        # An RMSNorm with float32 statistics rounds to the input's dtype first, and then multiplies by the gain.
        normalised: Tensor = _Normalise.apply(wide, None, None, self)
        return normalised.to(x.dtype) if weight is None else weight * normalised.to(x.dtype)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each token over all features, (…, 1); for RMSNorm 0 and the mean square."""
        total = sum(self.sizes)
        own = torch.stack((x.mean(-1), x.var(-1, correction=0))) if self.norm.centred else x.square().sum(-1)[None]
        if not self.norm.centred:
            self.world.all_reduce(own, axes=self.axes).wait()
            return x.new_zeros(()), (own[0] / total)[..., None]
        parts = own.new_empty(len(self.sizes), *own.shape)
        self.world.all_gather(own, into=parts, axes=self.axes).wait()
        counts = torch.cat([own.new_full([1] * own.dim(), size) for size in self.sizes])  # copies nothing from the host
        means, variances = parts.unbind(1)
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        return mean[..., None], variance[..., None]


class ShardedNorm(nn.Module):
    """Norm that holds this rank's part of weight and bias; becomes the first base class of the module's class."""

    sharding: SplitNorm

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of this rank's features `x`, with statistics over all features."""
        norm = self.sharding.norm
        stored = self._parameters.get(norm.gain)
        gain = stored + norm.offset if stored is not None and norm.offset else stored
        return self.sharding(x, gain, self._parameters.get(norm.bias))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, split: SplitNorm) -> Tensor:
        mean, variance = split.moments(x)
        epsilon = torch.finfo(x.dtype).eps if split.norm.epsilon is None else split.norm.epsilon
        scale = (variance + epsilon).rsqrt()
        normalised = x * scale if not split.norm.centred else (x - mean) * scale
        ctx.split = split
        ctx.has_bias = bias is not None
        ctx.save_for_backward(normalised, scale, weight)
        y = normalised if weight is None else normalised * weight
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        normalised, scale, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = needed_gradients(ctx)[:3]
        g = dy if weight is None or not for_x else dy * weight
        dx = _start_dx(g, normalised=normalised, scale=scale, split=ctx.split) if for_x else None
        over = tuple(range(dy.dim() - 1))  # while the means arrive
        d_weight = (dy * normalised).sum(over).to(weight.dtype) if for_weight else None
        d_bias = dy.sum(over) if for_bias else None
        return dx and dx(), d_weight, d_bias, None


def _start_dx(g: Tensor, *, normalised: Tensor, scale: Tensor, split: SplitNorm) -> Callable[[], Tensor]:
    """Start the all-reduce of the means in the formula of dx, and return a function that waits and returns dx."""
    sums = [(g * normalised).sum(-1)] + ([g.sum(-1)] if split.norm.centred else [])
    means = torch.stack(sums)
    reducing = split.world.all_reduce(means, axes=split.axes)

    def finish() -> Tensor:
        reducing.wait()
        over_all = means[..., None] / sum(split.sizes)
        dx = torch.addcmul(g, normalised, over_all[0], value=-1)
        if split.norm.centred:
            dx -= over_all[1]
        return dx * scale

    return finish


@dataclass(frozen=True)
class SplitStatistics(BoundToRank):
    """Split of a batch norm's features: the axes, and each rank's size. The running statistics stay whole."""

    world: World
    axes: Axes
    sizes: tuple[int, ...]

    @contextlib.contextmanager
    def narrowed(self, norm: nn.Module) -> Iterator[None]:
        """Inside the block, the running statistics are this rank's part; in training, gather them afterwards."""
        whole = {name: kept for name, kept in norm._buffers.items() if kept is not None and kept.dim()}
        parts = {name: kept.split(self.sizes)[self.world.group(self.axes).index] for name, kept in whole.items()}
        norm._buffers.update(parts)
        try:
            yield
        finally:
            norm._buffers.update(whole)
        for name, kept in whole.items() if norm.training else ():
            self.world.all_gather(parts[name].clone(), into=list(kept.split(self.sizes)), axes=self.axes).wait()


class ShardedBatchNorm(nn.Module):
    """Batch norm over this rank's features; becomes the first base class of the module's class."""

    sharding: SplitStatistics

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the name that torch gives it)
        """Return the batch norm of this rank's features, and update the running statistics in training."""
        with self.sharding.narrowed(self):
            output: Tensor = super().forward(input)
        return output

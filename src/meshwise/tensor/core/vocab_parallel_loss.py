"""Compute the cross-entropy of logits that are split over the vocabulary.

A rank has some of the classes of every token. From them it computes two numbers per token (three with label
smoothing). One all-gather exchanges these numbers; the logits are not sent:

    each rank:  log Σ exp(its logits),  the target's logit or 0,  Σ w · its logits

    loss = w[target] · (log Σ exp(all logits) - target's logit), and with label smoothing ε over V classes
           (1 - ε) · loss + ε/V · Σ_v w_v (log Σ exp(all logits) - logit_v)

The gradient of a rank's logits needs no communication: it is the softmax, minus one at the target if the rank has it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwise.comm.api.world import World

_BLOCK = 256 << 10
"""Elements that are processed at a time on a CPU."""
_GPU_BLOCK = 1 << 25
"""Elements that are processed at a time on a GPU."""


@dataclass(frozen=True)
class VocabularySplit:
    """Split of the classes over `axes`; `sizes`: each rank's number of classes, in group order."""

    world: World
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of classes over all ranks."""
        return sum(self.sizes)

    @property
    def first(self) -> int:
        """Index of this rank's first class."""
        return sum(self.sizes[: self.world.group(self.axes).index])


@dataclass(frozen=True)
class _How:
    """Inputs of the loss that need no gradient. `counts`: 0 for ignored targets, else 1. `weights`: weights of this
    rank's classes. `total`: sum of the weights of all classes."""

    vocabulary: VocabularySplit
    smoothing: float
    counts: Tensor
    weights: Tensor
    total: Tensor


def cross_entropy(
    local: Tensor,
    *,
    target: Tensor,
    vocabulary: VocabularySplit,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy in nats of (N, …, local classes) logits for (N, …) integer targets.

    The options are as in `torch.nn.functional.cross_entropy`; `weight` is for all classes.
    The result is equal on all ranks of the vocabulary. Its shape is (N, …) for reduction `none`, else it is a scalar.
    Raises ValueError for wrong shapes or an unknown reduction. Raises IndexError for a target that is no class; on CUDA
    a device-side assertion fails instead."""
    if local.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {(*local.shape[:-1], vocabulary.size)}, classes last, need targets of shape "
            f"{tuple(local.shape[:-1])}, not {tuple(target.shape)}"
        )
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction={reduction!r}; there are none, mean, sum")
    if weight is not None and weight.shape != (vocabulary.size,):
        raise ValueError(f"weight of shape {tuple(weight.shape)} for {vocabulary.size} classes")
    counted = target != ignore_index
    _require_classes(target, counted, vocabulary.size)
    classes = target.masked_fill(~counted, 0)
    weights = local.new_ones(vocabulary.size, dtype=_wide(local.dtype)) if weight is None else weight
    counts = counted.to(weights.dtype)
    scale = counts if weight is None else weights[classes] * counts
    own = slice(vocabulary.first, vocabulary.first + local.size(-1))
    how = _How(vocabulary, label_smoothing, counts, weights[own], weights.sum())
    losses: Tensor = _CrossEntropy.apply(local, classes, scale, how)
    if reduction == "none":
        return losses.to(local.dtype)
    total = losses.sum()
    return (total if reduction == "sum" else total / scale.sum()).to(local.dtype)


def _require_classes(target: Tensor, counts: Tensor, size: int) -> None:
    if target.is_meta:
        return
    valid = ((target >= 0) & (target < size)) | ~counts
    if target.device.type == "cuda":
        torch._assert_async(valid.all())
    elif not bool(valid.all()):
        raise IndexError(f"target {int(target[~valid][0])} is out of bounds for {size} classes")


class _CrossEntropy(torch.autograd.Function):
    """Autograd function of the losses (…), from logits (…, local classes), target classes and factors (0: ignored)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, classes: Tensor, scale: Tensor, how: _How) -> Tensor:
        vocabulary, smoothing = how.vocabulary, how.smoothing
        own = classes - vocabulary.first
        here = (own >= 0) & (own < local.size(-1))
        own = own.masked_fill(~here, 0)
        at_target = local.gather(-1, own[..., None])[..., 0]
        numbers = [_log_sum(local), at_target.to(scale.dtype).masked_fill(~here, 0)]
        if smoothing:
            numbers.append((local.to(scale.dtype) * how.weights).sum(-1))
        parts = scale.new_empty(len(vocabulary.sizes), len(numbers), *classes.shape)
        vocabulary.world.all_gather(torch.stack(numbers), into=parts, axes=vocabulary.axes).wait()
        log_sum = parts[:, 0].logsumexp(0)
        losses = (1 - smoothing) * scale * (log_sum - parts[:, 1].sum(0))
        if smoothing:
            even = how.counts * (how.total * log_sum - parts[:, 2].sum(0))
            losses += smoothing / vocabulary.size * even
        ctx.how = how
        ctx.save_for_backward(local, own, here, scale, log_sum)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        local, own, here, scale, log_sum = ctx.saved_tensors
        how: _How = ctx.how
        hit = gradient * scale * (1 - how.smoothing)
        even = gradient * how.counts * (how.smoothing / how.vocabulary.size)
        result = _softmax_times(local, log_sum, factor=hit + how.total * even)
        result.scatter_add_(-1, own[..., None], -(hit * here)[..., None].to(result.dtype))
        if how.smoothing:
            result -= (even[..., None] * how.weights).to(result.dtype)
        return result, None, None, None


def _log_sum(local: Tensor) -> Tensor:
    """Return log Σ exp over the last dim, at least in float32; works in blocks of rows to save memory."""
    rows = local.reshape(-1, local.size(-1))
    result = rows.new_empty(rows.size(0), dtype=_wide(local.dtype))
    for part in _blocks(rows):
        result[part] = rows[part].to(result.dtype).logsumexp(-1)
    return result.view(local.shape[:-1])


def _softmax_times(local: Tensor, log_sum: Tensor, *, factor: Tensor) -> Tensor:
    """Return factor · exp(local - log_sum); `factor` and `log_sum` have one number per row of `local`."""
    rows = local.reshape(-1, local.size(-1))
    result = torch.empty_like(rows)
    log_sums, factors = log_sum.reshape(-1, 1), factor.reshape(-1, 1)
    for part in _blocks(rows):
        torch.mul((rows[part] - log_sums[part]).exp_(), factors[part], out=result[part])
    return result.view(local.shape)


def _blocks(rows: Tensor) -> list[slice]:
    """Return slices of rows: on a CPU small enough for its cache, on a GPU large enough to fill the device."""
    step = max(1, (_BLOCK if rows.is_cpu else _GPU_BLOCK) // max(1, rows.size(1)))
    return [slice(start, start + step) for start in range(0, rows.size(0), step)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32

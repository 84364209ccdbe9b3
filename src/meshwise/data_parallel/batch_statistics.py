"""Batch normalisation over the batch: over a micro-batch of all ranks, not over the rows of one.

Under a plan with replicas a rank has some of the rows. Statistics over those rows alone would make the split model
another model. Here the statistics cover the micro-batch with this number on all ranks together. That equals one process
that trains on the same micro-batches of the global batch one after the other. So `dp` changes nothing; `microbatches`
does, as it does on one process.

The statistics of all ranks follow from the mean, the squared deviations and the number of values of each rank (Chan,
Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979)

    n = Σ nᵢ        mean = Σ nᵢ meanᵢ / n        M = Σ (Mᵢ + nᵢ (meanᵢ - mean)²)        variance = M / n

which loses no digits where the mean is large, and takes one all-gather of 2C+1 numbers per rank forward, one
reduce-scatter of as many backward. A rank without rows takes part with n = 0.

An instance norm computes nothing over the batch, but keeps a mean over its samples for eval mode. The mean of all ranks
is the mean of theirs, weighted by samples.

`F.batch_norm` is answered for while the model runs, whatever class of the model's calls it; modules stay what they are.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.base.batch_norm_classes import BatchNorm, RunningNorm
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.model.random_interception import ForwardAndBackwardMode


@dataclass(frozen=True)
class _Call:
    """The arguments of F.batch_norm."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


class BatchStatistics(ForwardAndBackwardMode):
    """The statistics of the batch norms of a module, on one rank."""

    def __init__(self, module: nn.Module, *, world: World, axes: tuple[str, ...], joined: bool) -> None:
        """`axes`: those along which ranks have other rows of the batch. `joined`: the model has such norms somewhere,
        and so the ranks along them have to run their micro-batches together.
        """
        super().__init__()
        self._world, self._axes = world, axes
        self._norms = list(running_norms(module).values())
        self.joined = joined
        self.active = joined and bool(self._norms)
        """Whether the module has such norms, so that `running` has something to do."""
        self._counts = True
        self._again = False
        self._counter: Tensor | None = None

    @contextlib.contextmanager
    def running(self, *, counts: bool, again: bool = False) -> Iterator[None]:
        """Inside, the model runs rows that count or do not. `again`: what runs repeats parts of their forward."""
        self._counts, self._again, self._counter = counts, again, None
        with self:
            yield

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `func`: over the whole micro-batch for a batch norm that takes statistics."""
        if func is functional.batch_norm and (call := _Call(*args, **kwargs)).training:
            return self._normalised(call)
        if func is functional.instance_norm:
            return self._each_normalised(_INSTANCES.bind(*args, **kwargs))
        if func is Tensor.add_ and any(args[0] is norm.num_batches_tracked for norm in self._norms):
            self._counter = args[0]
        return func(*args, **kwargs)

    def _normalised(self, call: _Call) -> Tensor:
        x = call.input if call.input.dtype.itemsize >= 4 else call.input.float()
        mean, squares, count = self._of_all(x if self._counts else x[:0])
        variance = squares / count.clamp(min=1)
        with torch.no_grad():
            self._remember(call.running_mean, mean, count, call.momentum)
            self._remember(call.running_var, squares / (count - 1).clamp(min=1), count, call.momentum)
            if self._counter is not None:
                self._counter.sub_((count == 0 if not self._again else count >= 0).long().squeeze())
            self._counter = None
        scale = torch.rsqrt(variance + call.eps)
        scale = scale if call.weight is None else scale * call.weight
        shift = -mean * scale if call.bias is None else call.bias - mean * scale
        shape = (-1, *(1,) * (x.ndim - 2))
        return torch.addcmul(shift.view(shape), x, scale.view(shape)).to(call.input.dtype)

    def _each_normalised(self, call: inspect.BoundArguments) -> Tensor:
        """Return the result of an instance norm, and update its running statistics from all ranks."""
        call.apply_defaults()
        given = call.arguments
        kept = [given[name] for name in ("running_mean", "running_var") if given[name] is not None]
        if not kept or not given["use_input_stats"]:
            return functional.instance_norm(*call.args, **call.kwargs)
        before = [running.clone() for running in kept]
        output = functional.instance_norm(*call.args, **call.kwargs)
        with torch.no_grad():
            if not self._again:
                number = len(given["input"]) if self._counts else 0
                total = torch.cat([*(running * number for running in kept), kept[0].new_full((1,), number)])
                self._world.all_reduce(total, axes=self._axes).wait()
                *sums, count = total.split([*(len(running) for running in kept), 1])
                before = [torch.where(count > 0, sum_ / count, old) for sum_, old in zip(sums, before, strict=True)]
            for running, value in zip(kept, before, strict=True):
                running.copy_(value)
        return output

    def _of_all(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean [C], the sum of squared deviations [C] and the number [1] of the values of x[B, C, …] on all
        ranks.

        Raises ValueError, as torch does, when there is one value only.
        """
        others = [dim for dim in range(x.ndim) if dim != 1]
        number = x.numel() // x.shape[1]
        if number:
            variance, own = torch.var_mean(x, others, correction=0)
        else:
            variance = own = x.sum(others)  # zeros that lead back to x, as on the ranks with rows
        sums = torch.cat([own, variance * number, own.new_full((1,), number)])
        ranks = gradient.all_gather(sums[None], world=self._world, axes=self._axes).wait()
        means, squares, counts = ranks.split([x.shape[1], x.shape[1], 1], dim=1)
        count = counts.sum(0)
        if number <= 1 and count.item() == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
        mean = (counts * means).sum(0) / count.clamp(min=1)
        return mean, (squares + counts * (means - mean).square()).sum(0), count

    def _remember(self, running: Tensor | None, value: Tensor, count: Tensor, momentum: float) -> None:
        """Update running statistics by a value, unless it comes of no rows or of a repeated forward."""
        if running is not None and not self._again:
            running.lerp_(value.to(running.dtype), momentum * (count > 0).to(running.dtype))


_INSTANCES = inspect.signature(functional.instance_norm)


class _OneOfMany(nn.SyncBatchNorm):
    """SyncBatchNorm without torch's process group: the engine brings its statistics together."""

    forward = BatchNorm.forward


def batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    """Return the modules of a model that take statistics over the batch, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, BatchNorm)}


def running_norms(module: nn.Module) -> dict[str, RunningNorm]:
    """Return the norms with running statistics over the batch, by name; instance norms may have some too."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, BatchNorm) or (isinstance(part, RunningNorm) and part.track_running_stats)
    }


def take_over(module: nn.Module) -> contextlib.ExitStack:
    """Turn every SyncBatchNorm into a plain one until the stack closes; torch's process group is not used."""
    undo = contextlib.ExitStack()
    for norm in batch_norms(module).values():
        if type(norm) is nn.SyncBatchNorm:
            norm.__class__ = _OneOfMany
            undo.callback(setattr, norm, "__class__", nn.SyncBatchNorm)
    return undo

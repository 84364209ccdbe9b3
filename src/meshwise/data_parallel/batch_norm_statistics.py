"""Compute batch norm statistics over the rows that all ranks have in a micro-batch, not over one rank's rows.

docs/architecture.md says over which rows, and counts the collectives ("Statistics over the batch").

Each rank sends its mean, its sum of squared deviations Mᵢ and its number of values nᵢ. Statistics of all ranks (Chan,
Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979):

    n = Σ nᵢ        mean = Σ nᵢ meanᵢ / n        M = Σ (Mᵢ + nᵢ (meanᵢ - mean)²)        variance = M / n

The formula loses no digits if the mean is large. A rank without rows takes part with n = 0.

While the model runs, calls of `F.batch_norm` are intercepted, so every module that calls it works unchanged.

`refuse_renormed` refuses an embedding with `max_norm` where copies of its weight would differ. Its forward scales down,
in place, the weight rows that it looks up, which are others on ranks with other rows of the batch."""

import contextlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwise.base.batch_norm_classes import BatchNorm, RunningNorm
from meshwise.comm.api import autograd_collectives as gradient
from meshwise.comm.api.world import World
from meshwise.data_parallel.bucket import StorageConfig
from meshwise.model.random_interception import ForwardAndBackwardMode
from meshwise.plan import Plan, PlanError

_BATCH_NORM = inspect.signature(functional.batch_norm)


class BatchStatistics(ForwardAndBackwardMode):
    """Contexts in which the batch norms of a module compute their statistics over all ranks."""

    def __init__(self, module: nn.Module, *, world: World, axes: tuple[str, ...], joined: bool) -> None:
        """Find the norms of `module`.

        axes: mesh axes whose ranks have different rows of the batch.
        joined: True if some stage of the model has such norms; then all ranks run their micro-batches together."""
        super().__init__()
        self._world, self._axes = world, axes
        self._norms = list(batch_norms(module).values())
        self.joined = joined
        self.active = joined and bool(self._norms)
        """True if this module has such norms; if False, `running` is not needed."""
        self._counts = True
        self._counter: Tensor | None = None

    @contextlib.contextmanager
    def running(self, *, counts: bool) -> Iterator[None]:
        """Intercept the norms of the forward or backward that runs in the block.

        counts: False if the rows must not enter the statistics, as the spare row of a rank without rows.
        A forward that the model's own checkpointing repeats counts again, as on one process."""
        self._counts, self._counter = counts, None
        with self:
            yield

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `func`; for a batch norm in training, with statistics over all ranks."""
        if func is functional.batch_norm:
            bound = _BATCH_NORM.bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["training"]:
                return self._normalised(SimpleNamespace(**bound.arguments))
        if func is Tensor.add_ and any(args[0] is norm.num_batches_tracked for norm in self._norms):
            self._counter = args[0]  # torch counts before F.batch_norm; without rows on any rank it is taken back
        return func(*args, **kwargs)

    def _normalised(self, call: SimpleNamespace) -> Tensor:
        """Return the result of F.batch_norm for the arguments of a call, by name."""
        x = call.input if call.input.dtype.itemsize >= 4 else call.input.float()
        mean, squares, count = self._of_all(x if self._counts else x[:0])
        variance = squares / count.clamp(min=1)
        with torch.no_grad():
            self._remember(call.running_mean, mean, count, call.momentum)
            self._remember(call.running_var, squares / (count - 1).clamp(min=1), count, call.momentum)
            if self._counter is not None:
                self._counter.sub_((count == 0).long().squeeze())
            self._counter = None
        scale = torch.rsqrt(variance + call.eps)
        scale = scale if call.weight is None else scale * call.weight
        shift = -mean * scale if call.bias is None else call.bias - mean * scale
        shape = (-1, *(1,) * (x.ndim - 2))
        return torch.addcmul(shift.view(shape), x, scale.view(shape)).to(call.input.dtype)

    def _of_all(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean (C,), sum of squared deviations (C,) and number (1,) of all ranks' values x (B, C, …).

        Raises ValueError, as torch does, if there is only one value per channel."""
        others = [dim for dim in range(x.ndim) if dim != 1]
        number = x.numel() // x.shape[1]
        if number:
            variance, own = torch.var_mean(x, others, correction=0)
        else:
            variance = own = x.sum(others)  # zeros with a graph to x, as on the ranks with rows
        sums = torch.cat([own, variance * number, own.new_full((1,), number)])
        ranks = gradient.all_gather(sums[None], world=self._world, axes=self._axes).wait()
        means, squares, counts = ranks.split([x.shape[1], x.shape[1], 1], dim=1)
        count = counts.sum(0)
        if number <= 1 and count.item() == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
        mean = (counts * means).sum(0) / count.clamp(min=1)
        return mean, (squares + counts * (means - mean).square()).sum(0), count

    def _remember(self, running: Tensor | None, value: Tensor, count: Tensor, momentum: float) -> None:
        """Update a running statistic by `value`. Do nothing if `count` is 0."""
        if running is not None:
            running.lerp_(value.to(running.dtype), momentum * (count > 0).to(running.dtype))


class _OneOfMany(nn.SyncBatchNorm):
    """SyncBatchNorm that runs as a plain batch norm without torch's process group; the engine joins its statistics."""

    forward = BatchNorm.forward


def batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    """Return the batch norms of a model, by module name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, BatchNorm)}


def running_norms(module: nn.Module) -> dict[str, RunningNorm]:
    """Return all batch norms, and the instance norms with running statistics, by module name."""
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, BatchNorm) or (isinstance(part, RunningNorm) and part.track_running_stats)
    }


def disable_sync_batch_norm(module: nn.Module) -> contextlib.ExitStack:
    """Make every SyncBatchNorm of a model run without torch's process group, until the returned stack is closed."""
    undo = contextlib.ExitStack()
    for norm in batch_norms(module).values():
        if type(norm) is nn.SyncBatchNorm:
            norm.__class__ = _OneOfMany
            undo.callback(setattr, norm, "__class__", nn.SyncBatchNorm)
    return undo


def refuse_renormed(module: nn.Module, *, plan: Plan, world: World, storage: StorageConfig) -> None:
    """Raise PlanError for an embedding with `max_norm` if other copies, or a master, of its weight exist."""
    tiers, ranks = storage.tiers, world.group(plan.loss_axes).size
    copied = ranks > 1 or tiers.is_offloaded("masters") or tiers.is_offloaded("params")
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            stored = storage.precision.parameters or part.weight.dtype
            if copied or storage.precision.master_of(stored) != stored:
                raise PlanError(
                    f"{name or type(part).__name__} has max_norm={part.max_norm:g}, so its forward rescales rows of "
                    f"its weight. Under the plan '{plan}' other copies of the weight exist: on other ranks, on another "
                    "tier or in another dtype. Nearest that works: dp=1 offload=none precision=fp32 with a model in "
                    "fp32, and tp_mode=1d if tp > 1"
                )

"""Measure the gradient noise scale of a step (McCandlish et al., arXiv 1812.06162, appendix A.1).

The gradient G_b of a micro-batch of a replica (b samples) differs from the step's gradient G_B (B samples) by noise:

    |G|²   = (B |G_B|² - b |G_b|²) / (B - b)        squared norm of the true gradient
    tr(Σ)  = (|G_b|² - |G_B|²) / (1/b - 1/B)        variance of the gradient of one sample
    scale  = tr(Σ) / |G|²                           in samples; about the critical batch

|G_b|² is the mean over all B/b micro-batches. A hook adds up the squared norm of each gradient of this rank. Both
norms, by layer, are part of the step's own all-reduce. docs/large_batch.md has the parameters that are left out."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from meshwise.data_parallel.bucket import Bucket
from meshwise.data_parallel.bucket_layout import BucketPiece
from meshwise.data_parallel.stage_engines import Engine
from meshwise.plan import Plan, PlanError


@dataclass(frozen=True)
class NoiseScale:
    """Unbiased estimates from one step; their ratio fluctuates, so average them over steps first.

    | trace    tr(Σ), the variance of the gradient of one sample, summed over the parameters
    | square   |G|², the squared norm of the true gradient; an estimate may be negative
    | layers   (trace, square) of each layer, by the name of its block, or of its module outside of the blocks"""

    trace: float
    square: float
    layers: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """The noise scale of this step alone, in samples."""
        return self.trace / self.square


class NoiseMeter:
    """Meter that adds up squared norms of the gradients of micro-batches and of the step, by layer.

    Raises PlanError if the plan moves gradients or state off the device, or splits tokens over ranks."""

    def __init__(self, engine: Engine, *, plan: Plan) -> None:
        if plan.tiers.state_tiers != {"device"} or plan.token_axes:
            raise PlanError(
                f"the noise scale needs the gradient of a micro-batch on one rank, and '{plan}' moves or splits it; "
                "use offload=none and cp=1, or train.noise = false (Options(noise=False))"
            )
        self.layers = list(dict.fromkeys(layer_of(row.name) for row in engine.table.rows if row.trainable))
        self._parts = engine.world.group(plan.replica_axes).size * plan.microbatches
        self._small = torch.zeros(len(self.layers), dtype=torch.float64, device=engine.world.device)
        self._measured: list[tuple[Bucket, BucketPiece, int]] = []
        hooks = ExitStack()
        self.close = hooks.close
        """Function that removes the hooks from the parameters."""
        for unit in engine.units:
            for bucket, index, parameter in unit.trainable():
                piece = bucket.place.pieces[index]
                here = set(piece.row.summed) == set(plan.replica_axes) and piece.row.name not in engine.tied
                if here and bucket.counts:
                    layer = self.layers.index(layer_of(piece.row.name))
                    self._measured.append((bucket, piece, layer))
                    add = partial(_add_square, self._small[layer])
                    hooks.callback(parameter.register_post_accumulate_grad_hook(add).remove)

    def begin(self) -> None:
        """Begin a step."""
        self._small.zero_()

    def squares(self) -> Tensor:
        """Return this rank's part of the squared norms, fp64: of micro-batches by layer, then of the step by layer."""
        whole = torch.zeros_like(self._small)
        for bucket, piece, layer in self._measured:
            start = bucket.owned[0]
            low, high = max(piece.start, bucket.shard[0]), min(piece.stop, bucket.shard[1])
            if low < high:
                part = bucket.reduced_gradient[low - start : high - start]
                whole[layer] += torch.linalg.vector_norm(part).double() ** 2
        return torch.cat([self._small, whole])

    def scale(self, sums: Sequence[float], *, count: float, rows: int) -> NoiseScale | None:
        """Return the noise from the summed `squares` without loss scale; None if the micro-batches are not equal.

        count: count of the loss over the global batch. rows: samples of the global batch."""
        parts = self._parts
        if parts < 2 or rows % parts or not count:
            return None
        size = rows // parts
        found = {}
        for number, name in enumerate(self.layers):
            small = sums[number] * parts / count**2
            whole = sums[number + len(self.layers)] / count**2
            square = (rows * whole - size * small) / (rows - size)
            found[name] = ((small - whole) / (1 / size - 1 / rows), square)
        return NoiseScale(sum(trace for trace, _ in found.values()), sum(one for _, one in found.values()), found)


def _add_square(total: Tensor, parameter: Tensor) -> None:
    """Add the squared norm of a gradient to `total`. A function, so that the hook holds no reference to the meter."""
    if parameter.grad is not None:
        total += torch.linalg.vector_norm(parameter.grad).double() ** 2


def layer_of(name: str) -> str:
    """Return the block of a parameter, `blocks.3` of `blocks.3.mlp.weight`; its first module if it is in no block."""
    words = name.split(".")
    number = next((index for index, word in enumerate(words) if word.isdecimal()), 0)
    return ".".join(words[: number + 1])

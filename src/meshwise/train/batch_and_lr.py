"""Compute the size of each global batch (`BatchSizes`) and the learning rate of each step (`lr_schedule`).

The batch is fixed, grows with the samples read, or follows the noise scale: docs/large_batch.md draws both.

The size depends only on counts that a checkpoint stores. So a resumed run reads the same batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import optim

from meshwise.engine.noise_scale import NoiseScale
from meshwise.plan import Plan
from meshwise.train.job_settings import JobError, ScheduleJob, TrainJob
from meshwise.train.objects_by_name import bind, locate

PATIENCE = 20
"""Steps over which the noise scale is averaged, and that pass before the batch changes again."""


@dataclass
class NoiseAverage:
    """Running means over about the last 20 steps; a ratio of means has less bias than a mean of ratios.

    | steps     measured steps so far; `changed` of them before the last change of the batch
    | layers    means of trace and square, as in `NoiseScale`, by layer; of the whole model under the empty name"""

    steps: int = 0
    changed: int = 0
    layers: dict[str, list[float]] = field(default_factory=dict)

    def add(self, noise: NoiseScale) -> None:
        """Add the noise of one more step."""
        self.steps += 1
        rate = max(1 / self.steps, 1 / PATIENCE)
        for name, (trace, square) in {"": (noise.trace, noise.square), **noise.layers}.items():
            mean = self.layers.setdefault(name, [trace, square])
            mean[:] = [mean[0] + rate * (trace - mean[0]), mean[1] + rate * (square - mean[1])]

    def critical(self, layer: str = "") -> float:
        """Return the noise scale in samples; infinite while the noise hides the gradient."""
        trace, square = self.layers[layer]
        return trace / square if square > 0 else math.inf


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of the global batches of a job, in samples."""

    job: TrainJob

    @property
    def key(self) -> str:
        """Key of the job that sets the sizes."""
        return "train.auto_batch" if self.job.auto_batch else "train.ramp" if self.job.ramp else "train.batch"

    @property
    def first(self) -> int:
        """Size of the first batch, which is the smallest one."""
        return (self.job.auto_batch or self.job.ramp or (self.job.batch,))[0]

    @property
    def most(self) -> int:
        """Size of the largest batch."""
        return self.job.auto_batch[1] if self.job.auto_batch else self.job.batch

    def at(self, samples: int, *, chosen: int) -> int:
        """Return the size of the batch after `samples` samples. `chosen`: last result of `next_size`; 0: none yet."""
        if self.job.auto_batch:
            return chosen or self.first
        start, increment, whole = self.job.ramp or (self.job.batch, 1, 1)
        return min(self.job.batch, start + samples * ((self.job.batch - start) // increment) // whole * increment)

    def next_size(self, size: int, *, noise: NoiseAverage) -> int:
        """Return the size of the next batch under `auto_batch`, and note a change in `noise`."""
        low, high = self.job.auto_batch or (size, size)
        scale = noise.critical()
        wanted = 2 * size if scale >= 2 * size else size // 2 if scale <= size / 2 else size
        if noise.steps - noise.changed < PATIENCE or wanted == size or not low <= wanted <= high:
            return size
        noise.changed = noise.steps
        return wanted

    def check_parts(self, parts: int, *, plan: Plan) -> None:
        """Raise JobError unless each batch divides evenly into `parts` (two or more) micro-batches of all replicas."""
        sizes = (*self.job.ramp[:2], self.job.batch) if self.job.ramp else (self.first,)
        if parts < 2:
            raise JobError(f"noise needs two micro-batches in a step, and '{plan}' has one; use microbatches=2")
        if any(size % parts for size in sizes):
            raise JobError(
                f"the noise scale needs micro-batches of one size, and {self.key} = {', '.join(map(str, sizes))} is no "
                f"multiple of the {parts} micro-batches of '{plan}'; use {-(-self.first // parts) * parts}"
            )


def batch_factor(schedule: ScheduleJob, *, samples: int, size: int) -> float:
    """Return the factor of the learning rate for a batch of `size` samples after `samples`: scaling and warm-up."""
    power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[schedule.lr_scaling]
    rise = min(1.0, (samples + size) / schedule.warmup_samples) if schedule.warmup_samples else 1.0
    return float((size / schedule.base_batch) ** power * rise)


def lr_schedule(schedule: ScheduleJob, *, steps: int) -> Callable[[int], float]:
    """Return a function from the number of the step (0 … steps-1) to the learning rate, as a fraction of the peak.

    Step k of the warm-up has (k+1)/warmup of the peak. A decay ends at `schedule.floor` in the last step; the shape
    `constant` stays at the peak."""
    decay = steps - schedule.warmup if schedule.shape != "wsd" else round(schedule.decay * steps)
    first = max(steps - decay, schedule.warmup)

    def at(step: int) -> float:
        if step < schedule.warmup:
            return (step + 1) / schedule.warmup
        if schedule.shape == "constant" or step < first:
            return 1.0
        progress = min(1.0, (step - first) / max(1, steps - 1 - first))
        height = (1 + math.cos(math.pi * progress)) / 2 if schedule.shape == "cosine" else 1 - progress
        return schedule.floor + (1 - schedule.floor) * height

    return at


def scheduler(job: ScheduleJob) -> Callable[[optim.Optimizer], Any] | None:
    """Return a function that builds a job's scheduler, or None. Raises JobError for a wrong class or arguments."""
    if job.name is None:
        return None
    name = job.name if ":" in job.name else f"torch.optim.lr_scheduler:{job.name}"
    found: Any = locate(name, key="schedule.name")
    if found is optim.lr_scheduler.ReduceLROnPlateau:
        raise JobError(f"schedule.name = {job.name!r} follows a measured value, and a job counts updates; use another")
    bind(partial(found, None), arguments=job.arguments, key="schedule.arguments")
    return lambda optimizer: found(optimizer, **job.arguments)


def balanced_rows(rows: Sequence[int], *, seconds: Sequence[float]) -> list[int]:
    """Return the rows of each part of a batch with which the slowest part ends first; `rows` if that saves under 5 %.

    `seconds`: busy time of a step with `rows`, by part, taken as proportional to them. Each row goes to the part that
    would end first with it, and every part has one at least."""
    if not all(rows):
        return list(rows)
    each = [max(time, 1e-9) / count for time, count in zip(seconds, rows, strict=True)]
    found = [1] * len(rows)
    for _ in range(sum(rows) - len(rows)):
        found[min(range(len(rows)), key=lambda part: (found[part] + 1) * each[part])] += 1
    longest = max(count * time for count, time in zip(found, each, strict=True))
    return found if longest < 0.95 * max(seconds) else list(rows)

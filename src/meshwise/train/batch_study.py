"""Train a job with several batch sizes and learning rates (`train_trials`), and find the critical batch (`BatchStudy`).

All trials read the same number of samples, at a constant rate after a warm-up over the first tenth. So the steps to a
loss do not depend on the length of a trial. McCandlish et al. (arXiv 1812.06162, eq. 2.11) found that the steps S and
samples E to a loss follow, for the best rate of each batch,

    (S / S_min - 1) (E / E_min - 1) = 1,    which is    S = S_min + E_min / batch,    critical batch = E_min / S_min"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from meshwise.comm.api.world import World
from meshwise.engine.step_result import NonFiniteError
from meshwise.train.console_output import OutputConsole
from meshwise.train.job import Job, SampleJob
from meshwise.train.job_toml import to_toml
from meshwise.train.loop import train

TRIAL = "trial.toml"
"""Name of the file with the job of a trial, written when the trial has ended."""


def trial_job(job: Job, *, batch: int, lr: float, samples: int, folder: str) -> Job:
    """Return the job of one trial in `folder`. Its noise is measured if its micro-batches are of one size."""
    parts = (job.plan.dp or 1) * job.plan.microbatches
    warmup = {"shape": "constant", "warmup": 0, "warmup_samples": max(1, samples // 10), "lr_scaling": "none"}
    size = {"batch": batch, "steps": samples // batch, "ramp": None, "auto_batch": None}
    files = {
        "output": str(Path(folder) / f"batch-{batch}-lr-{lr:g}"),
        "save_every": 0,
        "validate_every": 0,
        "resume": None,
    }
    noise = {"noise": parts > 1 and batch % parts == 0}
    changes: dict[str, dict[str, Any]] = {"optimizer": {"lr": lr}, "schedule": warmup, "train": size | files | noise}
    new = {name: dataclasses.replace(getattr(job, name), **values) for name, values in changes.items()}
    return dataclasses.replace(job, sample=SampleJob(), restarts=0, **new)


def train_trials(world: World, *, jobs: Sequence[Job], seconds: float) -> int:
    """Train each job that has not ended, until `seconds` have passed; return how many are left. Every rank calls it."""
    end = time.monotonic() + seconds
    for number, job in enumerate(jobs):
        folder = Path(job.train.output)
        done, late = world.exchange((has_ended(job), time.monotonic() > end))[0]
        if done:
            continue
        if late:
            return sum(not has_ended(left) for left in jobs[number:])
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            OutputConsole().print(f"{number + 1}/{len(jobs)}  batch {job.train.batch}, lr {job.optimizer.lr:g}")
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.suppress(NonFiniteError):
            train(world, job=job, console=Console(file=nowhere))
        if world.rank == 0:
            (folder / TRIAL).write_text(to_toml(job), "utf-8")
    return 0


def has_ended(job: Job) -> bool:
    """Return whether the trial of a job has ended; False if its folder has a trial of another job."""
    path = Path(job.train.output) / TRIAL
    return path.exists() and path.read_text("utf-8") == to_toml(job)


@dataclass(frozen=True)
class Trial:
    """One trial that has ended.

    | losses     mean loss over the last twentieth of all steps, after each step; inf until there are so many, and for a
    |            trial whose loss was not finite
    | critical   critical batch by the noise scale at the end, in samples; NaN if it was not measured"""

    batch: int
    lr: float
    losses: tuple[float, ...]
    critical: float

    def steps_to(self, loss: float) -> float:
        """Return the steps until the mean loss is at most `loss`; inf if it never is."""
        return next((step for step, reached in enumerate(self.losses, start=1) if reached <= loss), math.inf)


def read_trial(job: Job) -> Trial:
    """Return the trial of a job that has ended."""
    lines = (Path(job.train.output) / "metrics.jsonl").read_text("utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    means = [math.inf] * max(1, len(losses))
    if all(event["event"] != "nonfinite" for event in events):
        width = max(1, len(losses) // 20)
        sums = np.cumsum([0.0, *losses])
        means[width - 1 :] = ((sums[width:] - sums[:-width]) / width).tolist()
    noise = [event["critical"] for event in events if event["event"] == "noise" and event["critical"] is not None]
    return Trial(job.train.batch, job.optimizer.lr, tuple(means), noise[-1] if noise else math.nan)


@dataclass(frozen=True)
class BatchStudy:
    """Trials that have ended, and the loss to reach; None: the lowest that every batch size reaches with some rate."""

    trials: tuple[Trial, ...]
    target: float | None = None

    @cached_property
    def loss(self) -> float:
        """The loss whose steps and samples are compared; inf if no trial is finite."""
        if self.target is not None:
            return self.target
        lowest: dict[int, float] = {}
        for one in self.trials:
            lowest[one.batch] = min(lowest.get(one.batch, math.inf), *one.losses)
        return max((loss for loss in lowest.values() if loss < math.inf), default=math.inf)

    @cached_property
    def best(self) -> tuple[Trial, ...]:
        """The trial of each batch size that reaches the loss first, by batch."""
        order = sorted(self.trials, key=lambda one: (one.batch, one.steps_to(self.loss), min(one.losses)))
        return tuple({one.batch: one for one in reversed(order)}.values())[::-1]

    @cached_property
    def fit(self) -> tuple[float, float]:
        """(S_min, E_min) by least squares of the relative errors; NaN with fewer than two batch sizes."""
        reached = [(one.batch, one.steps_to(self.loss)) for one in self.best if one.steps_to(self.loss) < math.inf]
        if len(reached) < 2:
            return math.nan, math.nan
        batches, steps = np.array(reached).T
        rows = np.stack([1 / steps, 1 / batches / steps], axis=1)
        least, samples = np.linalg.lstsq(rows, np.ones(len(steps)), rcond=None)[0].tolist()
        return least, samples

    @property
    def critical(self) -> float:
        """The critical batch of the fit; inf if the steps fall as 1 / batch up to the largest batch."""
        least, samples = self.fit
        return samples / least if not least <= 0 else math.inf

    def rows(self) -> list[tuple[str, ...]]:
        """Return a table of all trials, with a row of titles: the columns of the CSV."""
        found: list[tuple[str, ...]] = [("batch", "lr", "best", "steps", "samples", "final loss", "noise scale")]
        for one in sorted(self.trials, key=lambda one: (one.batch, one.lr)):
            steps = one.steps_to(self.loss)
            shown = (f"{one.losses[-1]:.4f}", "" if math.isnan(one.critical) else f"{one.critical:.1f}")
            reached = ("", "") if steps == math.inf else (f"{steps:.0f}", f"{steps * one.batch:.0f}")
            found.append((str(one.batch), f"{one.lr:g}", "best" * (one in self.best), *reached, *shown))
        return found

"""The command `meshwise batch`: find by short trials how a job's steps and best learning rate depend on the batch size.

All trials read the same number of samples, at a constant rate after a warm-up over the first tenth. The rate does not
decay, so the steps to a loss do not depend on later samples. `BatchStudy` fits S_min and E_min of McCandlish et al.
(arXiv 1812.06162, eq. 2.11; docs/large_batch.md): (S / S_min - 1) (E / E_min - 1) = 1 for S steps and E samples."""

import base64
import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from pathlib import Path

import numpy as np
from rich.console import Console

from meshwise.cli.shared_flags import check_outputs, checked_comm, local_ranks, require_matplotlib, write_and_say
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run
from meshwise.engine.step_result import NonFiniteError
from meshwise.train.console_output import OutputConsole, counted, text_table
from meshwise.train.flags_and_toml import read_job, to_toml
from meshwise.train.job_settings import Job, JobError, SampleJob, ScheduleJob, StudiedJob
from meshwise.train.loop import train
from meshwise.train.prepare_job import prepare
from meshwise.view.picture import html_document, html_table

TRIAL = "trial.toml"
"""Name of the file with the job of a trial, written when the trial has ended."""


def trial_job(job: Job, *, batch: int, lr: float, samples: int, folder: str) -> Job:
    """Return the job of one trial in `folder`. A noise scale is measured if a step has several equal micro-batches."""
    parts = (job.plan.dp or 1) * job.plan.microbatches
    warmup = ScheduleJob(shape="constant", warmup_samples=max(1, samples // 10))
    size = {"batch": batch, "steps": samples // batch, "ramp": None, "auto_batch": None}
    files = {"output": str(Path(folder) / f"batch-{batch}-lr-{lr:g}"), "save_every": 0, "validate_every": 0}
    other = {"resume": None, "noise": parts > 1 and batch % parts == 0}
    changed = job.changed(optimizer={"lr": lr}, train={**size, **files, **other})
    return dataclasses.replace(changed, schedule=warmup, sample=SampleJob(), restarts=0)


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

    | losses     after each step, mean loss of the last 5 % of all steps; inf in the first steps, which are too few, and
    |            in a trial whose loss was not finite
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
    """Trials that have ended, and the loss to reach. `target`: None for the lowest that every batch size reaches."""

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
        """For each batch size, in ascending order, the trial that reaches `loss` in the fewest steps."""
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


@dataclass(frozen=True)
class BatchJob(StudiedJob):
    """Train short trials of a job over batch sizes and learning rates, and draw what the batch size does."""

    folder: str = "runs/batch"
    """Folder of the study; `train.output` is ignored."""
    batches: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Batch sizes to try."""
    factors: tuple[float, ...] = (1.0, 2.0, 0.5, 4.0)
    """Learning rates to try, as multiples of `optimizer.lr`; each is tried with every batch before the next one."""
    samples: int = 8192
    """Samples that each trial reads, whatever its batch."""
    target: float | None = None
    """Training loss whose steps and samples are compared. Default: the lowest that every batch reaches."""
    minutes: float = 10.0
    """Time after which no further trial begins; the same command continues later."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.batches or min(self.batches) < 1 or not self.factors or min(self.factors) <= 0:
            raise JobError(f"batches = {self.batches} and factors = {self.factors} need numbers above 0")
        if self.samples < 20 * max(self.batches):
            least = 20 * max(self.batches)
            raise JobError(f"samples = {self.samples} are fewer than 20 steps of the largest batch; use {least}")


def main(arguments: Sequence[str]) -> int:
    """Run the study that the arguments describe, and write its files; return the exit status. Raises JobError."""
    job = read_job(arguments, prog="meshwise batch", kind=BatchJob)
    folder, size = Path(job.folder), local_ranks(job)
    check_outputs([folder / "study.csv"])
    require_matplotlib(folder / "study.png")
    own = {name: value for name, value in vars(job).items() if name in Job.__dataclass_fields__}
    plain = Job(**{**own, "plan": job.plan.resolve(size)})
    jobs = [
        trial_job(plain, batch=batch, lr=job.optimizer.lr * factor, samples=job.samples, folder=job.folder)
        for factor, batch in itertools.product(job.factors, job.batches)
    ]
    for one in jobs[: len(job.batches)]:
        prepare(one, ranks=size)
    print(f"starting {counted(size, of='local rank')} for {counted(len(jobs), of='trial')}, into {folder}", flush=True)
    left = run(size, partial(train_trials, jobs=jobs, seconds=60 * job.minutes), comm=checked_comm(job.comm))[0]
    study = BatchStudy(tuple(read_trial(one) for one in jobs if has_ended(one)), job.target)
    if study.loss == math.inf:
        raise JobError(f"no trial in {folder} has a finite loss; lower optimizer.lr = {job.optimizer.lr:g}")
    console = OutputConsole()
    console.show(text_table(study.rows()))
    lines = conclusions(study)
    console.show("\n".join(lines))
    title = f"{job.optimizer.name} on {job.model.name}: {', '.join(map(str, job.batches))} samples a step"
    table = "".join(f"{','.join(row)}\n" for row in study.rows())
    write_and_say(folder / "study.csv", write=lambda path: path.write_text(table, "utf-8"))
    png = picture(study)
    write_and_say(folder / "study.png", write=lambda path: path.write_bytes(png))
    text = "".join(f"<p>{escape(line)}</p>" for line in (*lines, f"meshwise batch {' '.join(arguments)}"))
    image = f'<img alt="" style="max-width:100%" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    body = f'<h1>{escape(title)}</h1>{text}{image}<div class="wide">{html_table(study.rows())}</div>'
    write_and_say(folder / "study.html", write=lambda path: path.write_text(html_document(body, title=title), "utf-8"))
    if left:
        late = f"{counted(left, of='trial')} not begun after {job.minutes:g} minutes; the same command continues"
        print(late, file=sys.stderr)
    return 0


def conclusions(study: BatchStudy) -> list[str]:
    """Return the results of a study as sentences."""
    least, samples = study.fit
    noise = [one.critical for one in study.best if not math.isnan(one.critical)]
    rates = ", ".join(f"{one.lr:g} at {one.batch}" for one in study.best)
    lines = [f"loss {study.loss:.4f}, the best learning rates: {rates}"]
    if math.isnan(study.critical):
        lines.append("fewer than two batch sizes reach the loss; choose a higher one with --target")
    elif study.critical == math.inf:
        lines.append("the steps fall as 1 / batch up to the largest batch: the critical batch is larger")
    else:
        lines.append(f"critical batch {study.critical:.0f} samples: at least {least:.0f} steps, {samples:.0f} samples")
    if noise:
        lines.append(f"critical batch by the noise scale, at the end of trials: {min(noise):.0f} to {max(noise):.0f}")
    return lines


def picture(study: BatchStudy) -> bytes:
    """Return a PNG with three panels over the batch size: steps and samples to the loss, best rate, final losses."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `plot`

    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    batches = [one.batch for one in study.best]
    steps = [one.steps_to(study.loss) for one in study.best]
    least, samples = study.fit
    panels[0].plot(batches, steps, "o", label="steps")
    panels[0].plot(batches, [step * batch for step, batch in zip(steps, batches, strict=True)], "s", label="samples")
    panels[0].plot(batches, [least + samples / batch for batch in batches], "C0--", label="fit")
    panels[0].plot(batches, [least * batch + samples for batch in batches], "C1--")
    if math.isfinite(study.critical):
        panels[0].axvline(study.critical, color="gray", linestyle=":", label="critical batch")
    panels[1].plot(batches, [one.lr for one in study.best], "o-")
    for lr in sorted({one.lr for one in study.trials}):
        line = sorted((one.batch, one.losses[-1]) for one in study.trials if one.lr == lr)
        panels[2].plot(*zip(*line, strict=True), "o-", label=f"lr {lr:g}")
    titles = (f"to loss {study.loss:.3f}", "best learning rate", "loss after the same samples")
    for panel, title in zip(panels, titles, strict=True):
        panel.set(title=title, xlabel="batch, samples", yscale="linear" if panel is panels[2] else "log")
        panel.set_xscale("log", base=2)
        panel.grid(visible=True, alpha=0.3)
    for panel in (panels[0], panels[2]):
        panel.legend(fontsize="x-small")
    file = io.BytesIO()
    figure.savefig(file, dpi=110, format="png")
    return file.getvalue()

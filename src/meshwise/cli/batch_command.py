"""The command `meshwise batch`: find by short trials how a job's steps and best learning rate depend on the batch size.

Each trial is a run in the folder `folder`, beside `study.html`, `study.png` and `study.csv`. A second call trains the
trials that are missing, so a study can be stopped at any time."""

import base64
import csv
import io
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from meshwise.bench.collective_benchmark import require_matplotlib
from meshwise.cli.flag_values import checked_comm, local_ranks
from meshwise.cli.output_files import check_outputs, html_document, html_table, write_and_say
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run
from meshwise.train.batch_study import BatchStudy, has_ended, read_trial, train_trials, trial_job
from meshwise.train.console_output import OutputConsole, counted, text_table
from meshwise.train.job import Job, JobError, StudiedJob
from meshwise.train.job_toml import read_job
from meshwise.train.prepare_job import prepare


@dataclass(frozen=True)
class BatchJob(StudiedJob):
    """Train short trials of a job over batch sizes and learning rates, and draw what the batch size does."""

    folder: str = "runs/batch"
    """Folder of the study; `train.output` is ignored."""
    batches: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Batch sizes to try."""
    factors: tuple[float, ...] = (1.0, 2.0, 0.5, 4.0)
    """Learning rates to try, as multiples of `optimizer.lr`, in this order: the first one with every batch first."""
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
            raise JobError(
                f"samples = {self.samples} are fewer than 20 steps of the largest batch; use {20 * max(self.batches)}"
            )


def main(arguments: Sequence[str]) -> int:
    """Run the study that the arguments describe, and write its files; return the exit status. Raises JobError."""
    job = read_job(arguments, prog="meshwise batch", kind=BatchJob)
    folder, size = Path(job.folder), local_ranks(job)
    check_outputs([folder / "study.csv"])
    require_matplotlib()
    own = {name: value for name, value in vars(job).items() if name in Job.__dataclass_fields__}
    plain = Job(**{**own, "plan": job.plan.resolve(size)})
    jobs = [
        trial_job(plain, batch=batch, lr=job.optimizer.lr * factor, samples=job.samples, folder=job.folder)
        for factor, batch in itertools.product(job.factors, job.batches)
    ]
    for one in jobs[: len(job.batches)]:
        prepare(one, ranks=size)
    print(f"starting {counted(size, of='local rank')} for {counted(len(jobs), of='trial')}, into {folder}", flush=True)
    left = run(size, _rank, args=(jobs, 60 * job.minutes), comm=checked_comm(job.comm))[0]
    study = BatchStudy(tuple(read_trial(one) for one in jobs if has_ended(one)), job.target)
    if study.loss == math.inf:
        raise JobError(f"no trial in {folder} has a finite loss; lower optimizer.lr = {job.optimizer.lr:g}")
    console = OutputConsole()
    console.show(text_table(study.rows()))
    lines = conclusions(study)
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)
    title = f"{job.optimizer.name} on {job.model.name}: {', '.join(map(str, job.batches))} samples a step"
    write_and_say(folder / "study.csv", write=lambda path: _write_csv(study, path))
    write_and_say(folder / "study.png", write=lambda path: path.write_bytes(picture(study)))
    page = _page(study, lines=[*lines, f"meshwise batch {' '.join(arguments)}"], title=title)
    write_and_say(folder / "study.html", write=lambda path: path.write_text(page, "utf-8"))
    if left:
        print(
            f"{counted(left, of='trial')} not begun after {job.minutes:g} minutes; the same command continues",
            file=sys.stderr,
        )
    return 0


def _rank(world: World, jobs: Sequence[Job], seconds: float) -> int:
    return train_trials(world, jobs=jobs, seconds=seconds)


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
        lines.append(
            f"critical batch by the noise scale at the end of the trials: {min(noise):.0f} to {max(noise):.0f}"
        )
    return lines


def picture(study: BatchStudy) -> bytes:
    """Return a PNG with three panels over the batch size: steps and samples to the loss, best rate, final losses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - of the extra `plot`
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `plot`

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
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


def _write_csv(study: BatchStudy, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(study.rows())


def _page(study: BatchStudy, *, lines: Sequence[str], title: str) -> str:
    image = base64.b64encode(picture(study)).decode()
    text = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return html_document(
        f'<h1>{escape(title)}</h1>{text}<img alt="" style="max-width:100%" src="data:image/png;base64,{image}">'
        f'<div class="wide">{html_table(study.rows())}</div>',
        title=title,
    )

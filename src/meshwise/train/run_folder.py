"""The folder of a run: claimed once, never another run's.

runs/demo/job.toml                  the resolved job; `meshwise train runs/demo/job.toml` runs it again
runs/demo/metrics.jsonl             every event, one a line
runs/demo/checkpoints/              with train.save_every
runs/demo/launch                    the launcher's name for the job, when it may start the ranks again
runs/demo/tensorboard/              with train.tensorboard
runs/demo/timeline.json             with train.timeline
runs/demo/parameters.safetensors    the full parameters and buffers at the end
runs/demo/failure-rank-1.txt        the traceback of a rank that failed
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from meshwise.comm.api.job_attempt import JobAttempt
from meshwise.train.events import EventSink
from meshwise.train.job import Job, JobError
from meshwise.train.job_config import to_toml
from meshwise.train.progress_lines import terminal
from meshwise.train.record_files import JsonLines, TensorBoard
from meshwise.train.run_start import CHECKPOINTS, mark, numbered

TIMELINE = "timeline.json"
"""In the folder of a run: a step, action by action (`meshwise.pipeline.run.measured_step`)."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and what is where in it."""

    path: Path
    tensorboard: bool = False

    @classmethod
    def claim(cls, job: Job, *, path: Path | None = None, attempt: JobAttempt | None = None) -> RunFolder:
        """Return the folder at `path`, or a new one, whose name gets `-2`, `-3` … when it is taken; with the job in it.

        Raises JobError.
        """
        try:
            folder = cls(_claim(Path(job.train.output)) if path is None else path, job.train.tensorboard)
            mark(folder.path, attempt=attempt)
            folder.job.write_text(to_toml(job), encoding="utf-8")
        except OSError as error:
            raise JobError(f"train.output = {job.train.output!r}: {error.strerror}: {error.filename}") from error
        return folder

    @property
    def job(self) -> Path:
        """The resolved job."""
        return self.path / "job.toml"

    @property
    def metrics(self) -> Path:
        """Every event, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def parameters(self) -> Path:
        """The full parameters at the end."""
        return self.path / "parameters.safetensors"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints that the run keeps."""
        return self.path / CHECKPOINTS

    @property
    def timeline(self) -> Path:
        """A step, action by action."""
        return self.path / TIMELINE

    def sinks(self, console: Console, *, every: int) -> list[EventSink]:
        """Return the sinks of the run's events; `every`: steps between lines for people."""
        sinks: list[EventSink] = [terminal(console, every=every), JsonLines(self.metrics)]
        if self.tensorboard:
            sinks.append(TensorBoard(self.path / "tensorboard"))
        return sinks

    def outputs(self) -> dict[str, str]:
        """Return the output files at the end, by what they hold."""
        more = {"checkpoints": self.checkpoints} if self.checkpoints.is_dir() else {}
        more |= {"tensorboard": self.path / "tensorboard"} if self.tensorboard else {}
        more |= {"timeline": self.timeline} if self.timeline.exists() else {}
        known = {"job": self.job, "metrics": self.metrics, "parameters": self.parameters}
        return {name: str(path) for name, path in (known | more).items()}


def _claim(wanted: Path) -> Path:
    """Make a folder that was not there, at `wanted` or with a number appended; two runs never get the same one."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for path in numbered(wanted):
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("the numbers ended")

"""The folder of a run: claimed once, never another run's.

runs/demo/job.toml                  the resolved job; `meshwise train runs/demo/job.toml` runs it again
runs/demo/metrics.jsonl             every event, one a line
runs/demo/tensorboard/              with train.tensorboard
runs/demo/parameters.safetensors    the full parameters at the end
runs/demo/failure-rank-1.txt        the traceback of a rank that failed
"""

from __future__ import annotations

import itertools
from pathlib import Path

from rich.console import Console

from meshwise.train.config import to_toml
from meshwise.train.events import Sink
from meshwise.train.job import Job, JobError
from meshwise.train.records import JsonLines, TensorBoard
from meshwise.train.terminal import terminal


class RunFolder:
    """A new folder with the job in it. The name gets `-2`, `-3` … when it is taken. Raises JobError."""

    def __init__(self, job: Job) -> None:
        self._tensorboard = job.train.tensorboard
        self._every = job.train.log_every
        try:
            self.path = _claim(Path(job.train.output))
            self.job.write_text(to_toml(job), encoding="utf-8")
        except OSError as error:
            raise JobError(f"train.output = {job.train.output!r}: {error.strerror}: {error.filename}") from error

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

    def sinks(self, console: Console) -> list[Sink]:
        """Where the events of the run go."""
        sinks: list[Sink] = [terminal(console, every=self._every), JsonLines(self.metrics)]
        if self._tensorboard:
            sinks.append(TensorBoard(self.path / "tensorboard"))
        return sinks

    def outputs(self) -> dict[str, str]:
        """What is where at the end, by what it is."""
        tensorboard = {"tensorboard": str(self.path / "tensorboard")} if self._tensorboard else {}
        return {"job": str(self.job), "metrics": str(self.metrics), "parameters": str(self.parameters), **tensorboard}


def _claim(wanted: Path) -> Path:
    """Make a folder that was not there, at `wanted` or with a number appended; two runs never get the same one."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("itertools.count ended")

"""The folder of a run, and where a run begins: in a new folder or an old one, from nothing or from a checkpoint.

    runs/demo/job.toml                  the resolved job; `meshwise train runs/demo/job.toml` runs it again
    runs/demo/metrics.jsonl             every event, one JSON object a line
    runs/demo/checkpoints/              with train.save_every
    runs/demo/launch                    the launcher's name for the job, if it may start the ranks again
    runs/demo/tensorboard/              with train.tensorboard
    runs/demo/timeline.json             with train.timeline
    runs/demo/parameters.safetensors    the full parameters and buffers at the end
    runs/demo/failure-rank-1.txt        the traceback of a rank that failed

    | train.resume      folder                          begins from
    | (none)            a new one                       nothing
    | auto              `output`, if it exists          its newest valid checkpoint; nothing without one
    | a folder          a new one                       that checkpoint, or the newest valid one of that run

Ranks that their launcher has started again find the run's folder by the launcher's name for the job. They resume from
its checkpoints, and without any begin where the job began.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from meshwise.checkpoint.checkpoint_folder import newest_valid
from meshwise.checkpoint.checkpoint_index import INDEX
from meshwise.comm.api.job_attempt import JobAttempt
from meshwise.train.job import Job, JobError
from meshwise.train.job_toml import to_toml
from meshwise.train.metrics_files import JsonLines, TensorBoard
from meshwise.train.progress_lines import ProgressLines
from meshwise.train.run_events import EventSink

TIMELINE = "timeline.json"
"""File with a measured step, action by action (`meshwise.pipeline.run.measured_step`)."""
CHECKPOINTS = "checkpoints"
LAUNCH = "launch"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and the paths of its files."""

    path: Path
    tensorboard: bool = False

    @classmethod
    def claim(cls, job: Job, *, path: Path | None = None, attempt: JobAttempt | None = None) -> "RunFolder":
        """Return the folder at `path`, or a new one at `train.output`, and write the job into it.

        A new folder whose name is taken gets `-2`, `-3` and so on appended. Raises JobError.
        """
        try:
            folder = cls(_new_folder(Path(job.train.output)) if path is None else path, job.train.tensorboard)
            if attempt is not None and attempt.most:
                (folder.path / LAUNCH).write_text(attempt.run, encoding="utf-8")
            folder.job.write_text(to_toml(job), encoding="utf-8")
        except OSError as error:
            raise JobError(f"train.output = {job.train.output!r}: {error.strerror}: {error.filename}") from error
        return folder

    @property
    def job(self) -> Path:
        """The resolved job."""
        return self.path / "job.toml"

    @property
    def parameters(self) -> Path:
        """The full parameters at the end."""
        return self.path / "parameters.safetensors"

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def timeline(self) -> Path:
        """The file with a measured step, action by action."""
        return self.path / TIMELINE

    def sinks(self, console: Console, *, every: int) -> list[EventSink]:
        """Return the sinks of the run's events; `every`: steps between lines on the console."""
        sinks: list[EventSink] = [ProgressLines(console, every=every), JsonLines(self.path / "metrics.jsonl")]
        if self.tensorboard:
            sinks.append(TensorBoard(self.path / "tensorboard"))
        return sinks

    def outputs(self) -> dict[str, str]:
        """Return the paths of the output files that exist at the end, by name."""
        names = {"job": self.job.name, "metrics": "metrics.jsonl", "parameters": self.parameters.name}
        names |= {name: name for name in (CHECKPOINTS, "tensorboard")} | {"timeline": TIMELINE}
        return {name: str(self.path / file) for name, file in names.items() if (self.path / file).exists()}


@dataclass(frozen=True)
class RunStart:
    """Where a run begins.

    | folder    the run's folder to continue in; None: a new one
    | roots     folders of checkpoints; the newest valid one in the first folder that has any is restored
    | chosen    one checkpoint to restore if there is none in `roots`
    """

    folder: Path | None = None
    roots: tuple[Path, ...] = ()
    chosen: Path | None = None

    def candidate(self) -> Path | None:
        """Return the checkpoint to restore, if its bytes prove undamaged; None without a checkpoint."""
        found = (newest_valid(root).path for root in self.roots)
        return next((path for path in found if path is not None), self.chosen)


def find_run_start(job: Job, *, attempt: JobAttempt | None) -> RunStart:
    """Return where the run of this job begins, for this start of its ranks.

    Raises JobError when `train.resume` names no checkpoint.
    """
    start = _resume_start(job)
    folder = None if attempt is None else _folder_of(attempt, Path(job.train.output))
    if folder is None:
        return start
    own = folder / CHECKPOINTS
    return RunStart(folder, (own, *(root for root in start.roots if root != own)), start.chosen)


def _resume_start(job: Job) -> RunStart:
    """Return the start that `train.resume` names."""
    output, resume = Path(job.train.output), job.train.resume
    if resume is None or (resume == "auto" and not output.exists()):
        return RunStart()
    if resume == "auto":
        if not any((output / name).exists() for name in ("job.toml", CHECKPOINTS)):
            raise JobError(
                f"train.resume = 'auto', but train.output = '{output}' is no run: it has neither job.toml nor "
                f"{CHECKPOINTS}; name another folder"
            )
        return RunStart(output, (output / CHECKPOINTS,))
    place = Path(resume)
    if (place / INDEX).is_file():
        return RunStart(chosen=place)
    root = place / CHECKPOINTS if (place / CHECKPOINTS).is_dir() else place
    if not any(root.glob(f"*/{INDEX}")):
        raise JobError(
            f"train.resume = {resume!r}: no checkpoint there; name the folder of a run, one of its {CHECKPOINTS}, "
            "or 'auto'"
        )
    return RunStart(roots=(root,))


def _folder_of(attempt: JobAttempt, output: Path) -> Path | None:
    """Return the folder that an earlier start of this job has made."""
    if not attempt.is_named and not attempt.number:
        return None
    mine = [path for path in itertools.takewhile(Path.exists, _numbered(output)) if _launch_name(path) == attempt.run]
    return mine[-1] if mine else None


def _launch_name(folder: Path) -> str | None:
    try:
        return (folder / LAUNCH).read_text(encoding="utf-8")
    except OSError:
        return None


def _numbered(wanted: Path) -> Iterator[Path]:
    """Yield the folders that runs with this output claim, in order: `demo`, `demo-2`, `demo-3` and so on."""
    yield wanted
    for number in itertools.count(2):
        yield wanted.with_name(f"{wanted.name}-{number}")


def _new_folder(wanted: Path) -> Path:
    """Make a new folder at `wanted` or with a number appended; two runs never get the same one."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for path in _numbered(wanted):
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("the numbers never end")

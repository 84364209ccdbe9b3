"""Make or find the folder of a training run, and decide at which checkpoint the run begins.

    runs/demo/job.toml                  the resolved job; `meshwise train runs/demo/job.toml` runs it again
    runs/demo/metrics.jsonl             every event, one JSON object a line
    runs/demo/checkpoints/              with train.save_every
    runs/demo/launch                    torchrun's name for the job (run ID), if torchrun may start the ranks again
    runs/demo/tensorboard/              with train.loggers = ["tensorboard"]
    runs/demo/timeline.json             with train.timeline
    runs/demo/profile/                  with train.profile
    runs/demo/parameters.safetensors    the full parameters and buffers at the end
    runs/demo/failure-rank-1.txt        the traceback of a rank that failed

    | train.resume      folder                          begins from
    | (none)            a new one                       nothing
    | auto              `output`, if it exists          its newest valid checkpoint; nothing without one
    | a folder          a new one                       that checkpoint, or the newest valid one of that run

Ranks that torchrun has started again find the folder by the run ID in `launch`, and resume from its checkpoints.
If it has none, they begin where the first start began."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwise.checkpoint.checkpoint_folder import newest_valid
from meshwise.checkpoint.checkpoint_index import INDEX
from meshwise.checkpoint.hugging_face import is_pretrained
from meshwise.comm.api.job_processes import JobAttempt
from meshwise.train.job import Job, JobError
from meshwise.train.job_toml import to_toml

TIMELINE = "timeline.json"
"""Name of the file with a measured step, action by action (`meshwise.pipeline.run.measured_step`)."""
CHECKPOINTS = "checkpoints"
PROFILE = "profile"
LAUNCH = "launch"
"""Names in the run's folder, as in the table above."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and the paths of its files."""

    path: Path

    @classmethod
    def claim(cls, job: Job, *, path: Path | None = None, attempt: JobAttempt | None = None) -> "RunFolder":
        """Return the folder at `path` (None: a new folder at `train.output`) and write the job into it.

        If the name of a new folder exists, `-2`, `-3` … is appended. Raises JobError when the folder cannot be written.
        """
        try:
            folder = cls(_new_folder(Path(job.train.output)) if path is None else path)
            if attempt is not None and attempt.max_restarts:
                (folder.path / LAUNCH).write_text(attempt.job_name, encoding="utf-8")
            folder.job.write_text(to_toml(job), encoding="utf-8")
            folder.stop.unlink(missing_ok=True)
        except OSError as error:
            raise JobError(f"train.output = {job.train.output!r}: {error.strerror}: {error.filename}") from error
        return folder

    @property
    def job(self) -> Path:
        """The file with the resolved job."""
        return self.path / "job.toml"

    @property
    def stop(self) -> Path:
        """The file with which a user, or a cluster before its time limit, asks the run to save and end."""
        return self.path / "stop"

    @property
    def parameters(self) -> Path:
        """The file with the full parameters at the end."""
        return self.path / "parameters.safetensors"

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def timeline(self) -> Path:
        """The file with a measured step, action by action."""
        return self.path / TIMELINE

    @property
    def metrics(self) -> Path:
        """The file with every event."""
        return self.path / "metrics.jsonl"

    def outputs(self) -> dict[str, str]:
        """Return the paths of the output files and folders that exist, by name, such as `parameters`."""
        names = {"job": self.job.name, "metrics": self.metrics.name, "parameters": self.parameters.name}
        names |= {name: name for name in (CHECKPOINTS, PROFILE, "tensorboard")} | {"timeline": TIMELINE}
        return {name: str(self.path / file) for name, file in names.items() if (self.path / file).exists()}


@dataclass(frozen=True)
class RunStart:
    """Where a run begins: its folder, and its first checkpoint.

    | folder    the existing folder in which the run continues; None: a new folder
    | roots     folders of checkpoints; from the first one with a checkpoint, the newest valid one is restored
    | chosen    a checkpoint to restore if `roots` have none; None: the run then begins without a checkpoint"""

    folder: Path | None = None
    roots: tuple[Path, ...] = ()
    chosen: Path | None = None

    def candidate(self) -> Path | None:
        """Return the checkpoint to restore, unless loading finds damage in it; None if there is no checkpoint."""
        found = (newest_valid(root).path for root in self.roots)
        return next((path for path in found if path is not None), self.chosen)


def find_run_start(job: Job, *, attempt: JobAttempt | None) -> RunStart:
    """Return where the run of this job begins. `attempt`: this start of the ranks by torchrun; None without torchrun.

    Raises JobError when `train.resume` names no checkpoint."""
    start = _resume_start(job)
    folder = None if attempt is None else _folder_of(attempt, Path(job.train.output))
    if folder is None:
        return start
    own = folder / CHECKPOINTS
    return RunStart(folder, (own, *(root for root in start.roots if root != own)), start.chosen)


def _resume_start(job: Job) -> RunStart:
    """Return the start that `train.resume` names. Raises JobError when it names no run and no checkpoint."""
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
    if is_pretrained(place):
        raise JobError(
            f"train.resume = {resume!r} is a model in the layout of Hugging Face, without the state of a run; let the "
            "function of model.name return AutoModelForCausalLM.from_pretrained(folder)"
        )
    root = place / CHECKPOINTS if (place / CHECKPOINTS).is_dir() else place
    if not any(root.glob(f"*/{INDEX}")):
        raise JobError(
            f"train.resume = {resume!r}: no checkpoint there; name the folder of a run, one of its {CHECKPOINTS}, "
            "or 'auto'"
        )
    return RunStart(roots=(root,))


def _folder_of(attempt: JobAttempt, output: Path) -> Path | None:
    """Return the folder that an earlier attempt of this job has made; None if there is none."""
    if not attempt.is_named and not attempt.restarts:
        return None
    mine = [
        path for path in itertools.takewhile(Path.exists, _numbered(output)) if _launch_name(path) == attempt.job_name
    ]
    return mine[-1] if mine else None


def _launch_name(folder: Path) -> str | None:
    try:
        return (folder / LAUNCH).read_text(encoding="utf-8")
    except OSError:
        return None


def _numbered(wanted: Path) -> Iterator[Path]:
    """Yield the folder names that runs with this output take, in order: `demo`, `demo-2`, `demo-3` and so on."""
    yield wanted
    for number in itertools.count(2):
        yield wanted.with_name(f"{wanted.name}-{number}")


def _new_folder(wanted: Path) -> Path:
    """Make and return a new folder, `wanted` or with a number appended. Two runs never get the same folder."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for path in _numbered(wanted):
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("the numbers never end")

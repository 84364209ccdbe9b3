"""Make or find the folder of a training run, write its checkpoints, and resume from one.

docs/checkpoints.md shows the folder. Ranks that torchrun starts again find the folder by the run ID in its file
`launch`, and resume from its checkpoints. Without a checkpoint, they begin as the first start did.

docs/faults.md says what a resumed run continues, and `resume_keys.toml` lists the keys of its job that may differ.

All ranks must learn of a failed save at the same step, so `SaveFailed` is emitted at the next save or at the end."""

import contextlib
import hashlib
import itertools
import math
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwise.base.package_table import package_table
from meshwise.checkpoint.checkpoint_folder import checkpoints, newest_valid
from meshwise.checkpoint.checkpoint_format import INDEX, SaveError, read_index
from meshwise.checkpoint.hugging_face import is_pretrained
from meshwise.checkpoint.save_state import PendingSave
from meshwise.checkpoint.training_state import RestoredState
from meshwise.comm.api.launcher_info import JobAttempt
from meshwise.engine.step_result import StepResult
from meshwise.engine.trainer import Trainer
from meshwise.train.batch_and_lr import NoiseAverage
from meshwise.train.flags_and_toml import to_toml
from meshwise.train.job_settings import Job, JobError
from meshwise.train.prepare_job import PreparedJob
from meshwise.train.run_events import Resume, RunEvent, Saved, SaveFailed

TIMELINE = "timeline.json"
"""Name of the file with a measured step, action by action (`meshwise.pipeline.run.measured_step`)."""
JOB, METRICS, PARAMETERS = "job.toml", "metrics.jsonl", "parameters.safetensors"
CHECKPOINTS, BEST, PROFILE, LAUNCH, STOP = "checkpoints", "best", "profile", "launch", "stop"
"""Names in the run's folder, as docs/checkpoints.md shows it."""


def claim_run_folder(job: Job, *, path: Path | None = None, attempt: JobAttempt | None = None) -> Path:
    """Return the folder at `path` (None: a new folder at `train.output`) and write the job into it.

    If the name of a new folder exists, `-2`, `-3` … is appended. `attempt`: this start by torchrun; if torchrun may
    restart the ranks, its run ID is written to `launch`. Raises JobError when the folder cannot be written."""
    try:
        folder = _new_folder(Path(job.train.output)) if path is None else path
        if attempt is not None and attempt.max_restarts:
            (folder / LAUNCH).write_text(attempt.job_name, encoding="utf-8")
        (folder / JOB).write_text(to_toml(job), encoding="utf-8")
        (folder / STOP).unlink(missing_ok=True)
    except OSError as error:
        raise JobError(f"train.output = {job.train.output!r}: {error.strerror}: {error.filename}") from error
    return folder


def run_outputs(folder: Path) -> dict[str, str]:
    """Return the paths of a run's output files and folders that exist, by name, such as `parameters`."""
    names = {"job": JOB, "metrics": METRICS, "parameters": PARAMETERS}
    names |= {name: name for name in (CHECKPOINTS, PROFILE, "tensorboard")} | {"timeline": TIMELINE}
    return {name: str(folder / file) for name, file in names.items() if (folder / file).exists()}


@dataclass(frozen=True)
class RunStart:
    """Where a run begins: its folder, and its first checkpoint.

    | folder    the existing folder in which the run continues; None: a new folder
    | roots     folders of checkpoints, or a checkpoint. From the first root with a valid checkpoint, the newest valid
    |           checkpoint is restored. If no root has a checkpoint, the run begins at step 0"""

    folder: Path | None = None
    roots: tuple[Path, ...] = ()


def find_run_start(job: Job, *, attempt: JobAttempt | None) -> RunStart:
    """Return where the run of this job begins. `attempt`: this start of the ranks by torchrun; None without torchrun.

    Raises JobError when `train.resume` names no checkpoint."""
    start = _resume_start(job)
    if attempt is None or not (attempt.is_named or attempt.restarts):
        return start
    names = [path / LAUNCH for path in itertools.takewhile(Path.exists, _numbered(Path(job.train.output)))]
    mine = [name.parent for name in names if name.exists() and name.read_text(encoding="utf-8") == attempt.job_name]
    if not mine:
        return start
    own = mine[-1] / CHECKPOINTS
    return RunStart(mine[-1], (own, *(root for root in start.roots if root != own)))


def _resume_start(job: Job) -> RunStart:
    """Return the start that `train.resume` names. Raises JobError when it names no run and no checkpoint."""
    output, resume = Path(job.train.output), job.train.resume
    if resume is None or (resume == "auto" and not output.exists()):
        return RunStart()
    if resume == "auto":
        if not any((output / name).exists() for name in (JOB, CHECKPOINTS)):
            raise JobError(f"train.resume = 'auto', but train.output = '{output}' is no run; name another folder")
        return RunStart(output, (output / CHECKPOINTS,))
    place = Path(resume)
    if is_pretrained(place):
        raise JobError(
            f"train.resume = {resume!r} is a model in the layout of Hugging Face, without the state of a run; "
            f'train from it with model.name = "hf:{resume}"'
        )
    root = place / CHECKPOINTS if (place / CHECKPOINTS).is_dir() else place
    if not checkpoints(root):
        raise JobError(f"train.resume = {resume!r}: no checkpoint there; name a run, a checkpoint, or 'auto'")
    return RunStart(roots=(root,))


def _numbered(wanted: Path) -> Iterator[Path]:
    """Return the folder names that runs with this output take, in order: `demo`, `demo-2`, `demo-3` and so on."""
    return itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2)))


def _new_folder(wanted: Path) -> Path:
    """Make and return a new folder, `wanted` or with a number appended. Two runs never get the same folder."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for path in _numbered(wanted):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("the numbers never end")


@dataclass
class RunProgress:
    """The progress of a run: steps, samples read and updates applied so far, and the loss of the last step.

    | shares  rows of each replica relative to the others, with `train.shares = "auto"`
    | batch   size of the next batch, with `train.auto_batch`; 0: none chosen yet
    | noise   averaged gradient noise, if it is measured
    | best    lowest validation loss so far, with `train.keep_best`
    | stream  position in the training data, if they are a stream (`SampleStream.state`)"""

    step: int = 0
    samples: int = 0
    updates: int = 0
    loss: float = 0.0
    batch: int = 0
    noise: NoiseAverage = field(default_factory=NoiseAverage)
    best: float | None = None
    shares: list[int] = field(default_factory=list)
    stream: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "RunProgress":
        """Return the progress from a dict of `to_json`; a loss of None becomes NaN."""
        loss = math.nan if saved["loss"] is None else saved["loss"]
        return cls(**{**saved, "loss": loss, "noise": NoiseAverage(**saved["noise"])})

    def to_json(self) -> dict[str, Any]:
        """Return a dict of the fields for JSON; a loss that is not finite becomes None."""
        return asdict(self) | {"loss": self.loss if math.isfinite(self.loss) else None}

    def count(self, result: StepResult, *, batch: int, apart: bool) -> None:
        """Count one more step of `batch` samples. `apart`: ranks skip updates alone, so a skipped one counts too."""
        self.step += 1
        self.samples += batch
        self.updates += apart or not result.skipped
        self.loss = result.loss


def checked_run_start(prepared: PreparedJob, *, attempt: JobAttempt | None) -> RunStart:
    """Return where the run begins. Raises JobError if the checkpoint is of another job, or `train.resume` is wrong."""
    start = find_run_start(prepared.job, attempt=attempt)
    candidate = next(filter(None, (newest_valid(root)[0] for root in start.roots)), None)
    saved = {} if candidate is None else read_index(candidate).extra["user"]
    if "job" in saved:
        job_changes(saved, job=prepared.job, content=prepared.data.content)
    return start


def restore_run(
    trainer: Trainer, *, start: RunStart, prepared: PreparedJob, emit: Callable[[RunEvent], None]
) -> RunProgress:
    """Restore the trainer, emit `Resume`, and return the progress (zero without a checkpoint). Every rank calls it.

    A checkpoint of a script or an import has no job: the run continues at its `steps`, each of one batch of the job.

    Raises JobError for a checkpoint of another job, and DamageError when there are checkpoints but no valid one."""
    groups = trainer.optimizer.param_groups
    kept = [{name: group[name] for name in prepared.hyperparameters & group.keys()} for group in groups]
    found: RestoredState | None = next(filter(None, map(trainer.restore, start.roots)), None)
    for group, values in zip(groups, kept, strict=True):  # hyperparameters that the job sets keep its values
        group.update(values)
    if found is None:
        if start.folder is not None:
            emit(Resume(0, 0, "", [], []))
        return RunProgress()
    if "job" in found.extra:
        changed = job_changes(found.extra, job=prepared.job, content=prepared.data.content)
        progress = RunProgress.from_json(found.extra["progress"])
    else:
        changed, steps = [], int(found.extra.get("steps", 0))
        progress = RunProgress(steps, samples=steps * prepared.job.train.batch, updates=steps)
    if (found.extra.get("plan"), found.extra.get("ranks")) != (str(prepared.job.plan), trainer.world.size):
        # The generators in the checkpoint belong to ranks of another plan.
        place = f"{prepared.job.train.seed} {progress.samples} {trainer.world.rank} of {trainer.world.size}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "little"))
    emit(Resume(progress.step, progress.samples, str(found.path), changed, [str(damage) for damage in found.damaged]))
    return progress


def run_extra(prepared: PreparedJob, *, progress: RunProgress, ranks: int) -> dict[str, Any]:
    """Return a dict of JSON values that a checkpoint stores for `restore_run`, such as the job and the progress."""
    return {
        "job": to_toml(prepared.job),
        "content": prepared.data.content,
        "plan": str(prepared.job.plan),
        "ranks": ranks,
        "progress": progress.to_json(),
    }


def job_changes(saved: Mapping[str, Any], *, job: Job, content: str) -> list[str]:
    """Return one line for each difference from the checkpoint's job that the user should see.

    `saved` is from `run_extra`; `content` is `RunData.content`. Raises JobError with every forbidden difference."""
    before = _values(tomllib.loads(to_toml(Job()))) | _values(tomllib.loads(saved["job"]))
    now = _values(tomllib.loads(to_toml(job)))
    keys = package_table("train/resume_keys.toml")
    lines = {
        key: f"{key}: {_text(before.get(key))} -> {_text(now.get(key))}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    }
    refused = {key: line for key, line in lines.items() if not _within(key, (*keys["free"], *job.train.accept))}
    if saved["content"] != content:
        lines["data"] = f"content of the data: {saved['content']} -> {content}"
        if not _within("data", job.train.accept) and not _within("data.files", job.train.accept):
            refused["data"] = lines["data"]
    if refused:
        shown = "\n".join(f"  {line}" for line in refused.values())
        raise JobError(
            f"the job differs from the job of the checkpoint:\n{shown}\n"
            f"undo these changes, or accept them: --train.accept {' '.join(refused)}"
        )
    if "train.steps" in lines and job.schedule.shape != "constant" and job.schedule.name is None:
        lines["train.steps"] += ", and the learning rate follows the new length"
    return [line for key, line in lines.items() if not _within(key, keys["silent"])]


def _values(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in table.items():
        values |= _values(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return values


def _within(key: str, keys: Sequence[str]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def _text(value: Any) -> str:
    return "(default)" if value is None else repr(value)


@dataclass(eq=False)
class RunCheckpoints:
    """Writer of a trainer's checkpoints into folders of `root`. All ranks call `save` and `finish` at the same step."""

    trainer: Trainer
    root: Path
    keep_last: int
    emit: Callable[[RunEvent], None]
    _saving: PendingSave | None = None
    _unreported: Callable[[], Saved] | None = None
    _step: int = 0
    _failed: SaveError | None = None

    def save(self, step: int, *, name: str, extra: Mapping[str, Any]) -> None:
        """Wait for the previous save, then start to save the state after `step`, and `extra` (JSON values), into the
        folder `name`. If one of the two saves fails, `SaveFailed` is emitted and nothing is raised."""
        self._await()
        began, folder, self._step = time.monotonic(), self.root / name, step
        try:
            self._saving = self.trainer.save(folder, extra=extra, wait=False, keep_last=self.keep_last)
        except SaveError as error:
            self._fail(error)
            return
        held = time.monotonic() - began
        self._unreported = lambda: Saved(step, str(folder), time.monotonic() - began, held)

    def report_published(self) -> None:
        """Emit `Saved` once, if the save in progress is complete; do nothing otherwise."""
        saving = self._saving
        if saving is not None and self._unreported and saving.done and (saving.folder / INDEX).is_file():
            self._report()

    def finish(self) -> None:
        """Wait for the save in progress. Raises SaveError if the last save failed."""
        self._await()
        if self._failed is not None:
            # Every rank raises here, but no rank may end the job before rank 0 has printed the reason.
            self.trainer.world.barrier()
            raise self._failed

    def _await(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                saving.wait()
                self._failed = None
            except SaveError as error:
                self._fail(error)
            self._report()

    def _report(self) -> None:
        if self._unreported is not None:
            self.emit(self._unreported())
            self._unreported = None

    def _fail(self, error: SaveError) -> None:
        self._unreported, self._failed = None, error
        self.emit(SaveFailed(self._step, str(error)))

"""Resume a training run from a checkpoint, and refuse a checkpoint of another job.

The resumed run reads the samples and sets the learning rates of a run without interruption. The trainer restores the
model, the optimizer and (under the same plan) the random generators. In addition, a run has three counts that do not
depend on the plan: steps done, samples read, and updates applied (which set the learning rate).

The job must equal the checkpoint's job. Keys that do not change the results may differ; the difference is printed. Any
other difference is refused unless `train.accept` names its key. Data are compared by content, not by file name."""

import hashlib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from meshwise.checkpoint.checkpoint_index import read_index
from meshwise.checkpoint.training_state import RestoredState
from meshwise.comm.api.job_processes import JobAttempt
from meshwise.comm.api.world import World
from meshwise.engine.step_result import StepResult
from meshwise.engine.trainer import Trainer
from meshwise.plan import PlanError
from meshwise.train.batch_sizes import NoiseAverage
from meshwise.train.job import Job, JobError
from meshwise.train.job_toml import to_toml
from meshwise.train.prepare_job import Prepared
from meshwise.train.run_events import Event, Resume
from meshwise.train.run_folder import RunStart, find_run_start

T = TypeVar("T")

FREE_KEYS = (
    *("plan", "ranks", "restarts", "comm", "emulate", "swap", "sample"),
    *("model.tensor_rules", "model.cut", "model.cut_at", "data.files", "data.workers", "data.cache"),
    *("train.steps", "train.nonfinite", "train.log_every", "train.validate_every", "train.validate_batches"),
    *("train.loggers", "train.timeline", "train.profile", "train.save_every", "train.keep_last", "train.noise"),
    *("train.output", "train.resume", "train.accept"),
)
"""Keys that may differ from the job of the checkpoint, because they change at most the number of steps."""
_SILENT_KEYS = (
    "ranks",
    "restarts",
    "comm",
    "emulate",
    "swap",
    "data.cache",
    "train.output",
    "train.resume",
    "train.accept",
)


@dataclass
class RunProgress:
    """The progress of a run: steps, samples read and updates applied so far, and the loss of the last step.

    | batch   size of the next batch, with `train.auto_batch`; 0: none chosen yet
    | noise   averaged gradient noise, if it is measured"""

    step: int = 0
    samples: int = 0
    updates: int = 0
    loss: float = 0.0
    batch: int = 0
    noise: NoiseAverage = field(default_factory=NoiseAverage)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "RunProgress":
        """Return the progress from a dict of `to_json`; a loss of None becomes NaN."""
        loss = math.nan if saved["loss"] is None else saved["loss"]
        noise = NoiseAverage(**saved.get("noise", {}))
        return cls(saved["step"], saved["samples"], saved["updates"], loss, saved.get("batch", 0), noise)

    def to_json(self) -> dict[str, Any]:
        """Return a dict of the fields for JSON; a loss that is not finite becomes None."""
        return asdict(self) | {"loss": self.loss if math.isfinite(self.loss) else None}

    def count(self, result: StepResult, *, batch: int) -> None:
        """Count one more step of `batch` samples."""
        self.step += 1
        self.samples += batch
        self.updates += not result.skipped
        self.loss = result.loss


def on_first_rank(call: Callable[[], T], *, world: World) -> T:
    """Return the result of `call` on rank 0 to every rank. Its JobError or PlanError is raised on every rank."""
    outcome: tuple[T | None, Exception | None] = (None, None)
    if world.rank == 0:
        try:
            outcome = (call(), None)
        except (JobError, PlanError) as error:
            outcome = (None, error)
    result, problem = world.exchange(outcome)[0]
    if problem is not None:
        raise problem
    found: T = result
    return found


def checked_run_start(prepared: Prepared, *, attempt: JobAttempt | None) -> RunStart:
    """Return where the run begins. Raises JobError if the checkpoint is of another job, or `train.resume` is wrong."""
    start = find_run_start(prepared.job, attempt=attempt)
    candidate = start.candidate()
    if candidate is not None:
        saved = read_index(candidate).extra["user"]
        job_changes(saved, job=prepared.job, content=prepared.data.content)
    return start


def restore_run(trainer: Trainer, *, start: RunStart, prepared: Prepared, emit: Callable[[Event], None]) -> RunProgress:
    """Restore the trainer, emit `Resume`, and return the progress (zero without a checkpoint). Every rank calls it.

    Raises JobError for a checkpoint of another job, and DamageError when there are checkpoints but no valid one."""
    found = _restored(trainer, start, own=prepared.hyperparameters)
    if found is None:
        if start.folder is not None:
            emit(Resume(0, 0, "", [], []))
        return RunProgress()
    changed = job_changes(found.extra, job=prepared.job, content=prepared.data.content)
    progress = RunProgress.from_json(found.extra["progress"])
    if (found.extra["plan"], found.extra["ranks"]) != (str(prepared.job.plan), trainer.world.size):
        # The generators in the checkpoint belong to ranks of another plan.
        place = f"{prepared.job.train.seed} {progress.samples} {trainer.world.rank} of {trainer.world.size}"
        torch.manual_seed(int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "little"))
    emit(Resume(progress.step, progress.samples, str(found.path), changed, [str(damage) for damage in found.damaged]))
    return progress


def run_extra(prepared: Prepared, *, progress: RunProgress, ranks: int) -> dict[str, Any]:
    """Return a dict of JSON values that a checkpoint stores for `restore_run`, such as the job and the progress."""
    job, content = prepared.job, prepared.data.content
    return {
        "job": to_toml(job),
        "content": content,
        "plan": str(job.plan),
        "ranks": ranks,
        "progress": progress.to_json(),
    }


def _restored(trainer: Trainer, start: RunStart, *, own: frozenset[str]) -> RestoredState | None:
    """Restore and return the newest valid checkpoint, or None. Hyperparameters in `own` keep the job's values."""
    groups = trainer.optimizer.param_groups
    wanted = [{name: group[name] for name in own & group.keys()} for group in groups]
    found = next(filter(None, map(trainer.restore, start.roots)), None)
    if found is None and start.chosen is not None:
        found = RestoredState(start.chosen, trainer.load(start.chosen), ())
    for group, values in zip(groups, wanted, strict=True):
        group.update(values)
    return found


def job_changes(saved: Mapping[str, Any], *, job: Job, content: str) -> list[str]:
    """Return one line for each difference from the checkpoint's job that the user should see.

    `saved` is from `run_extra`; `content` is `RunData.content`. Raises JobError that names every forbidden difference.
    """
    before = _values(tomllib.loads(to_toml(Job()))) | _values(tomllib.loads(saved["job"]))
    now = _values(tomllib.loads(to_toml(job)))
    lines = {
        key: f"{key}: {_text(before.get(key))} -> {_text(now.get(key))}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    }
    refused = {key: line for key, line in lines.items() if not _within(key, (*FREE_KEYS, *job.train.accept))}
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
    if "train.steps" in lines and job.schedule.shape != "constant":
        lines["train.steps"] += ", and the learning rate follows the new length"
    return [line for key, line in lines.items() if not _within(key, _SILENT_KEYS)]


def _values(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested table by dotted key."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        values |= _values(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return values


def _within(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def _text(value: Any) -> str:
    return "(default)" if value is None else repr(value)

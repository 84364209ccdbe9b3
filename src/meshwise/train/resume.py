"""Going on where a checkpoint was: the same samples, the same learning rate, the same draws as if nothing had happened.

What the model and its optimizer are made of is the trainer's to restore. What is left of a run are three numbers: how
many steps it has done, how many samples it has met, how many updates were applied (skipped steps have none, and the
learning rate follows the updates). They are the same on every rank, whatever the plan.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from meshwise.checkpoint.checkpoint_index import read_index
from meshwise.checkpoint.training_state import RestoredState
from meshwise.comm.api.job_attempt import JobAttempt
from meshwise.comm.api.world import World
from meshwise.engine.step_result import StepResult
from meshwise.engine.trainer import Trainer
from meshwise.plan import PlanError
from meshwise.train.events import Event, Resume
from meshwise.train.job import JobError
from meshwise.train.job_changes import changes
from meshwise.train.job_config import to_toml
from meshwise.train.prepare import Prepared
from meshwise.train.run_start import RunStart, find_run_start

T = TypeVar("T")


@dataclass
class RunProgress:
    """How far a run is. `loss` is that of the last step."""

    step: int = 0
    samples: int = 0
    updates: int = 0
    loss: float = 0.0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> RunProgress:
        """Return the progress from a dict that `plain` made."""
        loss = math.nan if saved["loss"] is None else saved["loss"]
        return cls(saved["step"], saved["samples"], saved["updates"], loss)

    def plain(self) -> dict[str, Any]:
        """Return the numbers as JSON has them, which knows no NaN."""
        return asdict(self) | {"loss": self.loss if math.isfinite(self.loss) else None}

    def count(self, result: StepResult, *, batch: int) -> None:
        """Count one more step."""
        self.step += 1
        self.samples += batch
        self.updates += not result.skipped
        self.loss = result.loss


def on_first_rank(call: Callable[[], T], *, world: World) -> T:
    """Return the result of `call` on rank 0, on every rank; its user errors are raised on every rank."""
    found: tuple[T | None, Exception | None] = (None, None)
    if world.rank == 0:
        try:
            found = (call(), None)
        except (JobError, PlanError) as error:
            found = (None, error)
    result, refusal = world.exchange(found)[0]
    if refusal is not None:
        raise refusal
    told: T = result
    return told


def checked_origin(prepared: Prepared, *, attempt: JobAttempt | None) -> RunStart:
    """Return where the run begins. Raises JobError when this is not the job of the checkpoint it would go on from."""
    origin = find_run_start(prepared.job, attempt=attempt)
    candidate = origin.candidate()
    if candidate is not None:
        saved = read_index(candidate).extra["user"]
        changes(saved, job=prepared.job, content=prepared.data.content)
    return origin


def take_up(trainer: Trainer, *, origin: RunStart, prepared: Prepared, emit: Callable[[Event], None]) -> RunProgress:
    """Restore what there is to go on from; every rank calls it.

    Raises JobError when this is not the job of the checkpoint, DamageError when there are checkpoints and none is
    valid.
    """
    found = _restored(trainer, origin, own=tuple(prepared.optimizer_arguments))
    if found is None:
        if origin.folder is not None:
            emit(Resume(0, 0, "", [], []))
        return RunProgress()
    told = changes(found.extra, job=prepared.job, content=prepared.data.content)
    progress = RunProgress.of(found.extra["progress"])
    if (found.extra["plan"], found.extra["ranks"]) != (str(prepared.job.plan), trainer.world.size):
        _draw_anew(trainer, seed=prepared.job.train.seed, samples=progress.samples)
    emit(Resume(progress.step, progress.samples, str(found.path), told, [str(damage) for damage in found.damaged]))
    return progress


def kept(prepared: Prepared, *, progress: RunProgress, ranks: int) -> dict[str, Any]:
    """Return what a checkpoint keeps of the run, for `take_up`."""
    job, content = prepared.job, prepared.data.content
    return {
        "job": to_toml(job),
        "content": content,
        "plan": str(job.plan),
        "ranks": ranks,
        "progress": progress.plain(),
    }


def _restored(trainer: Trainer, origin: RunStart, *, own: tuple[str, ...]) -> RestoredState | None:
    """Return the state of the newest valid checkpoint, but for the hyperparameters in `own`: the job may change
    them.
    """
    groups = trainer.optimizer.param_groups
    wanted = [{name: group[name] for name in own} for group in groups]
    found = next(filter(None, map(trainer.restore, origin.roots)), None)
    if found is None and origin.chosen is not None:
        found = RestoredState(origin.chosen, trainer.load(origin.chosen), ())
    for group, values in zip(groups, wanted, strict=True):
        group.update(values)
    return found


def _draw_anew(trainer: Trainer, *, seed: int, samples: int) -> None:
    """Give this rank another stream of random numbers: that of another division of the work fits nobody here."""
    place = f"{seed} {samples} {trainer.world.rank} of {trainer.world.size}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "little"))

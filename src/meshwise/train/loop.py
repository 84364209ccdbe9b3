"""The loop: a job on the ranks of a world, from the first sample to the files at the end.

    each step    this rank's rows (data) → trainer.step → event → learning rate (schedule) → validation when due
    at the end   validation, a generated sample, the full parameters

Every rank runs it; what is printed and written comes from rank 0.
"""

from __future__ import annotations

import resource
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from meshwise.comm.world import World
from meshwise.nonfinite import NonFiniteError
from meshwise.parallelize import Options, parallelize
from meshwise.train.data import length, read
from meshwise.train.events import End, Events, NonFinite, Sample, Start, Step, Validation
from meshwise.train.export import write_parameters
from meshwise.train.failure import leave_traceback
from meshwise.train.folder import RunFolder
from meshwise.train.job import Job
from meshwise.train.order import Order
from meshwise.train.prepare import Prepared, prepare
from meshwise.train.sample import generate
from meshwise.train.schedule import rate
from meshwise.trainer import StepResult, Trainer
from meshwise.tree import map_tensors


@dataclass(frozen=True)
class Summary:
    """What a run came to: the loss of its last step, that of its last validation, its folder (on rank 0)."""

    loss: float
    validation: float | None
    folder: str | None


def train(world: World, *, job: Job, console: Console | None = None) -> Summary:
    """Run a job on the ranks of `world`; every rank calls it. `console`: where rank 0 talks, by default stdout.

    Raises JobError or PlanError for a job that cannot run, NonFiniteError as `train.nonfinite` says, and whatever the
    user's own model, loss and data raise.
    """
    prepared = prepare(job, ranks=world.size)
    job = prepared.job
    trainer = parallelize(
        prepared.model,
        job.plan,
        loss=prepared.loss,
        optimizer=prepared.optimizer,
        world=world,
        options=Options(clip_norm=job.train.clip_norm, seed=job.train.seed, nonfinite=job.train.nonfinite),
        **prepared.optimizer_arguments,
    )
    folder = RunFolder(job) if world.rank == 0 else None
    place = world.exchange(None if folder is None else folder.path)[0]
    try:
        with Events(() if folder is None else folder.sinks(console or Console())) as events:
            return _Run(trainer, prepared, folder, events).run()
    except Exception as error:
        leave_traceback(error, world=world, folder=place)
        raise
    finally:
        trainer.close()


class _Run:
    """One run of a job on one rank."""

    def __init__(self, trainer: Trainer, prepared: Prepared, folder: RunFolder | None, events: Events) -> None:
        self._trainer = trainer
        self._job = prepared.job
        self._data = prepared.data
        self._folder = folder
        self._emit = events.emit
        self._schedule = LambdaLR(trainer.optimizer, rate(self._job.schedule, steps=self._job.train.steps))
        self._validation: float | None = None

    def run(self) -> Summary:
        """Start, steps, end."""
        job, trainer = self._job, self._trainer
        started = time.monotonic()
        self._start()
        result = self._steps()
        self._validate(job.train.steps)
        if job.sample.length:
            text = generate(trainer, sample=job.sample, context=job.data.context, seed=job.train.seed)
            self._emit(Sample(job.train.steps, job.sample.prompt, text))
        self._save(result, time.monotonic() - started)
        return Summary(result.loss, self._validation, None if self._folder is None else str(self._folder.path))

    def _start(self) -> None:
        job, trainer = self._job, self._trainer
        start = Start(
            plan=str(job.plan),
            mesh=trainer.world.mesh.picture(),
            device=_device(trainer.world.device),
            parameters=sum(row.numel for row in trainer.table.rows),
            data=self._data.picture,
            steps=job.train.steps,
            batch=job.train.batch,
            memory=trainer.memory(),
            output="" if self._folder is None else str(self._folder.path),
        )
        self._emit(start)

    def _steps(self) -> StepResult:
        job = self._job.train
        began = last = time.monotonic()
        first, _ = self._trainer.share(job.batch)
        result = None
        for step, batch in enumerate(self._batches(), start=1):
            lr = self._trainer.optimizer.param_groups[0]["lr"]
            try:
                result = self._trainer.step(batch, local=True, first=first)
            except NonFiniteError as error:
                self._emit(NonFinite(step, str(error)))
                # Every rank raises here; none may end before rank 0 has said why.
                self._trainer.world.barrier()
                raise
            now = time.monotonic()
            self._emit(
                Step(
                    step=step,
                    steps=job.steps,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=lr,
                    tokens=result.tokens,
                    rate=result.tokens / (now - last),
                    memory=_peak_memory(self._trainer.world.device),
                    eta=(now - began) / step * (job.steps - step),
                    skipped=result.skipped,
                )
            )
            if result.problem is not None:
                self._emit(NonFinite(step, result.problem))
            if not result.skipped:
                self._schedule.step()
            if job.validate_every and step % job.validate_every == 0 and step < job.steps:
                self._validate(step)
                now = time.monotonic()
            last = now
        assert result is not None
        return result

    def _batches(self) -> Iterator[Any]:
        """This rank's rows of each global batch of the run."""
        job = self._job.train
        numbers = range(0, job.steps * job.batch, job.batch)
        return self._read(self._data.train, numbers, Order(length(self._data.train), seed=job.seed))

    def _validate(self, step: int) -> None:
        if self._data.validation is None:
            return
        job = self._job.train
        size = length(self._data.validation)
        most = size if job.validate_batches is None else min(size, job.validate_batches * job.batch)
        batches = self._read(self._data.validation, range(0, most, job.batch), Order(size, seed=0))
        result = self._trainer.evaluate(batches, local=True)
        self._validation = result.loss
        self._emit(Validation(step, result.loss, result.tokens))

    def _read(self, dataset: Dataset[Any], numbers: range, order: Order) -> Iterator[Any]:
        rows = read(dataset, numbers=numbers, share=self._trainer.share, order=order, workers=self._job.data.workers)
        if self._job.train.dtype is None:
            return rows
        dtype = getattr(torch, self._job.train.dtype)
        return (map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, batch) for batch in rows)

    def _save(self, result: StepResult, seconds: float) -> None:
        job = self._job
        metadata = {"steps": str(job.train.steps), "plan": str(job.plan), "model": job.model.name}
        folder = self._folder
        write_parameters(self._trainer, path=None if folder is None else folder.parameters, metadata=metadata)
        if folder is not None:
            following = shlex.join(["meshwise", "verify", str(folder.job)])
            self._emit(End(job.train.steps, seconds, result.loss, folder.outputs(), following))


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)} a rank"


def _peak_memory(device: torch.device) -> int:
    """The most bytes this process has used so far: of its GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

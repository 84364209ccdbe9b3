"""From a job to what the loop needs, with everything that can be wrong about it said before the first step.

The command line does this once before it starts any rank, so that a bad job is one message and status 2; each rank then
does it again for itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from meshwise.base.tensor_tree import map_tensors
from meshwise.comm.in_process.trace_world import TraceWorld
from meshwise.engine.cut_agreement import plan_schedule
from meshwise.engine.parallelize import Options, parallelize
from meshwise.model.deferred_init import shapes_of
from meshwise.model.forward import Loss
from meshwise.plan import PlanError
from meshwise.plan.plan_keys import is_path
from meshwise.train.counted import counted
from meshwise.train.dataset import RunData, length, load_data
from meshwise.train.job import Job, JobError
from meshwise.train.named_objects import check_text, loss_function, model_function, optimizer
from meshwise.train.record_files import summary_writer
from meshwise.train.token_file import STDLIB


@dataclass(frozen=True)
class Prepared:
    """A job that fits its ranks, and the things it names.

    job     with its plan resolved and its paths absolute, so that it can be run again as it is
    """

    job: Job
    model: Callable[[], nn.Module]
    loss: Loss
    optimizer: type[torch.optim.Optimizer]
    optimizer_arguments: dict[str, Any]
    data: RunData

    def options(self, example: Any) -> Options:
        """Return the options of the job for `parallelize`; `example`: a batch to cut by.

        `example`: a batch to cut by.
        """
        job = self.job
        return Options(
            clip_norm=job.train.clip_norm,
            seed=job.train.seed,
            nonfinite=job.train.nonfinite,
            tensor_rules=job.model.tensor_rules,
            swap=job.swap.made,
            cut=job.model.where,
            example=example,
        )


def prepare(job: Job, *, ranks: int) -> Prepared:
    """Return the objects that a job names, for a world of `ranks` ranks.

    Raises JobError or PlanError for what cannot work; what the user's own modules raise while they are imported passes
    through.
    """
    plan = job.plan.resolve(ranks)
    if plan.pp > 1:
        plan_schedule(plan)
    replicas = plan.dp or 1
    samples = f"train.batch = {counted(job.train.batch, of='sample')}"
    if job.train.batch < replicas:
        raise JobError(
            f"{samples} cannot be shared by the {replicas} replicas of '{plan}'; "
            f"use train.batch = {replicas} or more, or at most dp={job.train.batch}"
        )
    rows = -(-job.train.batch // replicas)
    if rows < plan.microbatches:
        raise JobError(
            f"{samples}, {rows} for a replica of '{plan}', are too few for its "
            f"micro-batches; use train.batch = {replicas * plan.microbatches} or more, or at most microbatches={rows}"
        )
    kind, arguments = optimizer(job.optimizer)
    model, loss, data = model_function(job), loss_function(job), load_data(job.data)
    if data.text:
        check_text(job)
    if job.train.batch > (size := length(data.train)):
        raise JobError(
            f"{samples}, and there are {size:,} to train on: a step would see some of them "
            f"twice; use train.batch = {size} or less, or more data"
        )
    if job.train.tensorboard:
        summary_writer()
    if job.sample.length and not data.text:
        raise JobError(f"sample.length = {job.sample.length}: only a model of text (data.files) writes a sample; use 0")
    return Prepared(_absolute(dataclasses.replace(job, plan=plan, ranks=None)), model, loss, kind, arguments, data)


def check_plan(prepared: Prepared) -> None:
    """Put the model under the plan on a rank that is not there. Raises PlanError when it cannot be.

    What else goes wrong may come of there being no values, and is left for the ranks to say.
    """
    job, example = prepared.job, default_collate([prepared.data.train[0]])
    options = prepared.options(example=map_tensors(lambda tensor: tensor.to("meta"), example))
    world = TraceWorld(rank=0, mesh=job.plan.mesh())
    try:
        source = shapes_of(prepared.model, seed=job.train.seed)
        parallelize(source, job.plan, loss=prepared.loss, world=world, options=options).close()
    except PlanError:
        raise
    except Exception:  # noqa: BLE001 -- see above
        return


def _absolute(job: Job) -> Job:
    """Return the job with paths that lead to the same places from any folder."""
    data = dataclasses.replace(
        job.data,
        files=tuple(name if name == STDLIB else str(Path(name).absolute()) for name in job.data.files),
        dataset=None if job.data.dataset is None else _absolute_name(job.data.dataset),
        cache=None if job.data.cache is None else str(Path(job.data.cache).absolute()),
    )
    return dataclasses.replace(
        job,
        plan=dataclasses.replace(job.plan, schedule=_absolute_path(job.plan.schedule)),
        model=dataclasses.replace(job.model, name=_absolute_name(job.model.name)),
        loss=_absolute_name(job.loss),
        data=data,
        train=dataclasses.replace(
            job.train, output=str(Path(job.train.output).absolute()), resume=_absolute_resume(job.train.resume)
        ),
    )


def _absolute_name(name: str) -> str:
    """`path/to/file.py:function` from the root; every other name as it is."""
    where, _, what = name.rpartition(":")
    return f"{Path(where).absolute()}:{what}" if where.endswith(".py") else name


def _absolute_path(schedule: str) -> str:
    return str(Path(schedule).absolute()) if is_path(schedule) else schedule


def _absolute_resume(resume: str | None) -> str | None:
    return resume if resume in (None, "auto") else str(Path(resume).absolute())

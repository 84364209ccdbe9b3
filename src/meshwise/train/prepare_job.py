"""Load the model function, loss, optimizer and data that a job names (`prepare`), and check its plan (`check_plan`).

A command does this before it starts ranks, so a wrong job ends with one message and status 2. Each rank repeats it."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwise.base.tensor_tree import map_tensors, take_rows
from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.schedule_and_cut import plan_schedule
from meshwise.memory.swap_file import SwapConfig
from meshwise.model.deferred_init import shapes_of
from meshwise.model.forward import Loss
from meshwise.model.parameter_table import ParameterOptions
from meshwise.plan import PlanError
from meshwise.plan.plan_keys import is_path
from meshwise.simulate.rehearsal import RehearsalSubject
from meshwise.train.batch_and_lr import BatchSizes, scheduler
from meshwise.train.console_output import counted
from meshwise.train.data_loading import STDLIB, RunData, SampleOrder, length, load_data, read_batches
from meshwise.train.fine_tuning_data import load_rows
from meshwise.train.job_settings import HUB, ROW_KINDS, Job, JobError
from meshwise.train.objects_by_name import check_text, loss_function, model_function, optimizer, optimizer_options
from meshwise.train.pretrained_model import check_rows_fit
from meshwise.train.run_events import logger_maker
from meshwise.train.streams_and_collators import sample_source


@dataclass(frozen=True)
class PreparedJob:
    """A checked job and the objects that it names. `model` builds the model.

    | job     the job with its plan resolved for the number of ranks, and absolute paths: it runs from any folder"""

    job: Job
    model: Callable[[], nn.Module]
    loss: Loss
    optimizer: type[torch.optim.Optimizer]
    optimizer_arguments: dict[str, Any]
    parameter_options: ParameterOptions | None
    scheduler: Callable[[torch.optim.Optimizer], Any] | None
    data: RunData

    @property
    def hyperparameters(self) -> frozenset[str]:
        """Keys of the optimizer's groups that the job sets."""
        kinds = self.optimizer_arguments.get("optimizers", {"": (self.optimizer, self.optimizer_arguments)})
        options = [*(arguments for _, arguments in kinds.values()), *self.job.optimizer.groups.values()]
        return frozenset({"lr", *(key for one in options for key in one)})

    def options(self, example: Any) -> Options:
        """Return the options of the job for `parallelize`. `example`: batch with which the model is cut into stages."""
        job, swap = self.job, self.job.swap
        return Options(
            clip_norm=job.train.clip_norm,
            seed=job.train.seed,
            expert_bias_rate=job.train.expert_bias_rate,
            expert_capacity=job.train.expert_capacity,
            router_losses=job.train.router_losses,
            nonfinite=job.train.nonfinite,
            noise=job.train.noise or job.train.auto_batch is not None,
            parameter_options=self.parameter_options,
            tensor_rules=job.model.tensor_rules,
            swap=SwapConfig(None if swap.folder is None else Path(swap.folder), swap.buffers, swap.megabytes * 2**20),
            cut=job.model.cut_options,
            sync=job.train.sync,
            example=example,
            forward=self.data.forward,
        )

    def training(self, example: Any) -> dict[str, Any]:
        """Return the loss, the optimizer with its arguments, and the `options`, as keywords of `parallelize`."""
        options = self.options(example)
        return {"loss": self.loss, "optimizer": self.optimizer, "options": options, **self.optimizer_arguments}

    def batches(self, count: int) -> Iterator[Any]:
        """Yield the first `count` global batches of the run, with all their rows."""
        size, data = BatchSizes(self.job.train).first, self.data
        order, numbers = SampleOrder(length(data.train), seed=self.job.train.seed), range(0, count * size, size)
        given: dict[str, Any] = {"collate": data.collate, "window": data.window, "order": order}
        return read_batches(sample_source(data.train, saved={}), numbers=numbers, share=lambda rows: (0, rows), **given)

    def example(self) -> Any:
        """Return a batch of one row, on which the model runs once, to be cut into stages."""
        return take_rows(next(self.batches(1)), start=0, stop=1)

    def rehearsal_subject(self, *, imbalance: float = 1.0) -> RehearsalSubject:
        """Return the model, loss, optimizer and first global batch of the job, for a rehearsal by the simulator.

        `imbalance`: tokens that the experts of the busiest rank get, as a multiple of the even share."""
        batch = next(self.batches(1))
        options = dataclasses.replace(self.options(example=batch), expert_imbalance=imbalance)
        return RehearsalSubject(self.model, self.loss, batch, self.optimizer, self.optimizer_arguments, options=options)


def prepare(job: Job, *, ranks: int) -> PreparedJob:
    """Check a job for a world of `ranks` ranks, and return it with the objects that it names.

    It imports the user's modules, and may build the token file of a text. Raises JobError or PlanError for a job that
    cannot run, and any exception of the imported modules."""
    plan = job.plan.resolve(ranks)
    if plan.pp > 1:
        plan_schedule(plan)
    replicas = plan.dp or 1
    sizes = BatchSizes(job.train)
    least, samples = sizes.first, f"{sizes.key} = {counted(sizes.first, of='sample')}"
    if least < replicas:
        raise JobError(
            f"{samples} cannot be shared by the {replicas} replicas of '{plan}'; "
            f"use {replicas} or more, or at most dp={least}"
        )
    rows = -(-least // replicas)
    if rows < plan.microbatches:
        raise JobError(
            f"{samples}, {rows} for a replica of '{plan}', are too few for its "
            f"micro-batches; use {replicas * plan.microbatches} or more, or at most microbatches={rows}"
        )
    if job.train.noise or job.train.auto_batch:
        sizes.check_parts(replicas * plan.microbatches, plan=plan)
    kind, arguments = optimizer(job.optimizer)
    job = with_tokenizer(job)
    model, loss = model_function(job), loss_function(job)
    data = load_rows(job.data) if job.data.has_records else load_data(job.data)
    if data.text:
        check_text(job)
    if data.largest is not None:
        module = shapes_of(model, seed=0).module
        check_rows_fit(module, largest=data.largest, context=job.data.context, packed=job.data.pack)
    if data.window > 1 and (job.train.ramp or job.train.auto_batch):
        raise JobError(f"data.bucket_by_length needs batches of one size; leave out {sizes.key}")
    if sizes.most > (size := length(data.train)):
        raise JobError(
            f"{sizes.key} = {counted(sizes.most, of='sample')}, but the training data has only {size:,}: a step would "
            f"read samples twice; use {size} or less, or more data"
        )
    for logger in job.train.loggers:
        logger_maker(logger)
    if job.sample.length and not data.text:
        raise JobError(f"sample.length = {job.sample.length}: only a model of text (data.files) generates text; use 0")
    rule = optimizer_options(job.optimizer, model=model)
    resolved = _absolute(dataclasses.replace(job, plan=plan, ranks=None))
    return PreparedJob(resolved, model, loss, kind, arguments, rule, scheduler(job.schedule), data)


def check_plan(prepared: PreparedJob) -> None:
    """Split the model by its plan, on one rank and without tensor values. Raises PlanError or JobError if it cannot.

    Other errors are ignored: their cause may be the missing values. If it is not, the ranks raise the same error."""
    job = prepared.job
    options = prepared.options(example=map_tensors(lambda tensor: tensor.to("meta"), prepared.example()))
    world = TraceWorld(rank=0, mesh=job.plan.mesh())
    try:
        source = shapes_of(prepared.model, seed=job.train.seed)
        parallelize(source, job.plan, loss=prepared.loss, world=world, options=options).close()
    except (PlanError, JobError):
        raise
    except Exception:  # noqa: BLE001 - see above
        return


def with_tokenizer(job: Job) -> Job:
    """Return the job; with records, an `hf:` model and no tokenizer, it gets the tokenizer of the model."""
    known = job.data.tokenizer or not job.model.name.startswith(HUB) or not job.data.has_records
    return job if known else job.changed(data={"tokenizer": job.model.name})


def _absolute(job: Job) -> Job:
    """Return the job with absolute paths in place of relative paths."""
    data, schedule, resume = job.data, job.plan.schedule, job.train.resume
    changed = job.changed(
        plan={"schedule": _absolute_path(schedule) if is_path(schedule) else schedule},
        model={"name": _absolute_name(job.model.name)},
        optimizer={"name": _absolute_name(job.optimizer.name)},
        schedule={"name": job.schedule.name and _absolute_name(job.schedule.name)},
        data={
            "files": tuple(name if name == STDLIB else _absolute_path(name) for name in data.files),
            "dataset": data.dataset and _absolute_name(data.dataset),
            "collator": data.collator and _absolute_name(data.collator),
            "cache": data.cache and _absolute_path(data.cache),
            "tokenizer": data.tokenizer and _absolute_name(data.tokenizer),
        },
        train={
            "output": _absolute_path(job.train.output),
            "resume": resume if resume in (None, "auto") else _absolute_path(resume),
        },
    )
    return dataclasses.replace(changed, loss=_absolute_name(job.loss))


def _absolute_path(path: str) -> str:
    return str(Path(path).absolute())


def _absolute_name(name: str) -> str:
    """Return `path/to/file.py:function`, `json:FILES` or `hf:FOLDER` with an absolute path; other names unchanged."""
    if name.startswith("whole:"):
        return f"whole:{_absolute_name(name.removeprefix('whole:'))}"
    kind, colon, place = name.partition(":")
    if f"{kind}:" in ROW_KINDS or (f"{kind}:" == HUB and Path(place).is_dir()):
        return f"{kind}{colon}{Path(place).absolute()}"
    where, _, what = name.rpartition(":")
    return f"{Path(where).absolute()}:{what}" if where.endswith(".py") else name

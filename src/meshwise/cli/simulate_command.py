"""The command `meshwise simulate`: predict a job's time and memory under a plan, also beside three real steps."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwise.base.text_format import time_text
from meshwise.cli import shared_flags
from meshwise.comm.api.streams import gpu_count
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run
from meshwise.pipeline.run.measured_step import MeasuredStep
from meshwise.plan import Plan
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.predicted_memory import MALLOC, MeasuredRank, measure, memory_of, memory_table
from meshwise.simulate.rehearsal import rehearse
from meshwise.simulate.step_prediction import Prediction, predict
from meshwise.train.console_output import counted, text_table
from meshwise.train.flags_and_toml import read_job
from meshwise.train.job_settings import JobError, StudiedJob, check_least
from meshwise.train.prepare_job import prepare
from meshwise.view.drawing_data import PlanAccount, comparison_table, predicted_account
from meshwise.view.text_pictures import draw_to_scale

_PLANS_PER_TABLE = 4


@dataclass(frozen=True)
class SimulateJob(StudiedJob, shared_flags.DrawingFiles):
    """Predict the time and memory of a training job by running its code for each kind of rank without tensor values."""

    on: str = ""
    """The cluster to predict times for, as in "64x8 h100": nodes, ranks per node, and the name of a shipped cluster or
    of a cluster file. Its number of ranks replaces dp=auto."""
    imbalance: float = 1.0
    """Tokens that the experts of the busiest rank get, as a multiple of the even share: with ep, 1 to ep."""
    compare: tuple[str, ...] = ()
    """Other plans to compare with the plan of the job: --compare "dp=8 zero=1" "tp=8"."""
    run: Path | None = None
    """The folder of a run that was trained with `--train.timeline`; its measured step is compared with the plans."""
    draw: bool = False
    """Draw the mesh and the timeline of each rank in the terminal; drawings in files show memory too."""
    memory: bool = False
    """Print the memory of each rank by category."""
    measure: bool = False
    """With --memory: train three steps of the job on local ranks, and print their memory beside the prediction. Memory
    that several ranks on CPUs share counts for each rank in equal parts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, least=1, names="imbalance")


def main(arguments: Sequence[str]) -> int:
    """Predict the job that the arguments describe; return the exit status 0. Raises JobError or PlanError."""
    job = read_job(arguments, prog="meshwise simulate", kind=SimulateJob)
    cluster = _checked_cluster(job)
    size = shared_flags.local_ranks(job) if cluster is None else cluster.ranks
    device = cluster.device.kind if cluster else "cuda" if gpu_count() else "cpu"
    comm = shared_flags.checked_comm(job.comm) if job.measure else None
    step = shared_flags.read_step(job.run) if job.run else None
    plans = [job.plan, *map(Plan.parse, job.compare)]
    jobs = [prepare(dataclasses.replace(job, plan=plan), ranks=size) for plan in plans]
    shared = cluster.shared if cluster else device == "cpu"
    subjects = [one.rehearsal_subject(imbalance=job.imbalance) for one in jobs]
    rehearsals = [
        rehearse(own, plan=one.job.plan, ranks=size, device=device, shared=shared)  # type: ignore[arg-type]
        for own, one in zip(subjects, jobs, strict=True)
    ]
    console = shared_flags.drawing_console()
    subject = str(rehearsals[0].plan) if len(plans) == 1 else f"{len(plans)} plans"
    title = f"{subject} on {job.on or counted(size, of='rank')}"
    console.show(title)
    if cluster is not None:
        _print_times([predict(rehearsal, cluster=cluster) for rehearsal in rehearsals], step=step, job=job, title=title)
    if job.memory:
        for rehearsal in rehearsals:
            measured: Sequence[MeasuredRank] = ()
            if job.measure and rehearsal is rehearsals[0]:
                os.environ.update(MALLOC)  # processes free memory at once
                measured = run(size, _measure_rank, args=(job,), comm=comm)[0]
            console.show(text_table(memory_table(memory_of(rehearsal), measured=measured)))
    return 0


def _print_times(predictions: Sequence[Prediction], *, step: MeasuredStep | None, job: SimulateJob, title: str) -> None:
    """Print and draw the predicted times of some plans on one cluster, and the times of the measured step if given."""
    console = shared_flags.drawing_console()
    accounts = [predicted_account(prediction) for prediction in predictions]
    if step:
        accounts.append(PlanAccount(f"measured in {job.run}", step.step))
    rows = comparison_table(accounts)
    for first in range(1, len(rows[0]), _PLANS_PER_TABLE):
        console.show(text_table([(row[0], *row[first : first + _PLANS_PER_TABLE]) for row in rows]))
    if job.draw:
        longest = max(account.timeline.seconds for account in accounts)
        for account in accounts:
            mesh = "" if account.plan is None else f"\n{account.plan.mesh().picture()}"
            seconds = time_text(account.timeline.seconds, unit=account.unit)
            console.show(f"\n{account.title}: step {seconds}{mesh}")
            console.show(draw_to_scale(account.timeline, width=console.width, seconds=longest, rows=account.names))
    shared_flags.write_drawings(accounts, files=job, title=title)


def _checked_cluster(job: SimulateJob) -> Cluster | None:
    """Return the cluster of `--on`, or None. Raises JobError for flags that need a cluster, and for useless flags."""
    shared_flags.check_drawings(job)
    if job.measure and not job.memory:
        raise JobError("--measure without --memory has no effect: it adds measured memory to that table; give --memory")
    if job.on:
        return shared_flags.named_cluster(job.on)
    if job.draw or job.wanted or job.compare or job.run:
        raise JobError('drawings and comparisons need the times of a cluster: name it, as in --on "64x8 h100"')
    if not job.memory:
        raise JobError('nothing to predict: give --memory, or --on with a cluster, as in --on "64x8 h100"')
    return None


def _measure_rank(world: World, job: SimulateJob) -> list[MeasuredRank]:
    """Train three steps of the job on this rank, and return the measurements of all ranks."""
    prepared = prepare(job, ranks=world.size)
    return measure(world, subject=prepared.rehearsal_subject(), plan=prepared.job.plan)

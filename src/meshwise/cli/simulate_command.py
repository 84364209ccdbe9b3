"""`meshwise simulate`: what a job would take under its plan, on ranks that need not be there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from meshwise.cli.drawing_output import DrawingFiles, check, drawing_board, read_step, save
from meshwise.cli.rank_count import chosen, local_ranks
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run
from meshwise.comm.network.torch_world import Comm
from meshwise.pipeline.run.measured_step import MeasuredStep as Step
from meshwise.plan import Plan
from meshwise.simulate.cluster import Cluster, ClusterError, parse_cluster
from meshwise.simulate.measured_ranks import MALLOC, MeasuredRank, measure
from meshwise.simulate.memory_use import memory_of
from meshwise.simulate.prediction import Prediction, predict
from meshwise.simulate.rehearsal import rehearse
from meshwise.simulate.rehearsal_subject import RehearsalSubject
from meshwise.simulate.simulation_tables import memory_table, time_table
from meshwise.simulate.value_requests import ASKS_ITS_BATCH
from meshwise.train.counted import counted
from meshwise.train.dataset import length, read
from meshwise.train.job import JobError, StudiedJob
from meshwise.train.job_config import read_job
from meshwise.train.prepare import Prepared, prepare
from meshwise.train.sample_order import SampleOrder
from meshwise.view.drawings import drawings
from meshwise.view.plan_account import PlanAccount, predicted
from meshwise.view.plan_comparison import comparison_table

_ABREAST = 4
"""Plans beside one another in a table of the terminal."""


@dataclass(frozen=True)
class SimulateJob(StudiedJob, DrawingFiles):
    """A training job, rehearsed: its own code runs on one rank of each kind, on tensors without values."""

    on: str = ""
    """A cluster to tell the time on: one that is shipped, or a file, after its nodes and ranks, as in "64x8 h100"; its
    ranks are those that dp=auto fills."""
    compare: tuple[str, ...] = ()
    """Other plans to put beside the job's: --compare "dp=8 zero=1" "tp=8"."""
    run: Path | None = None
    """The folder of a run that was trained with `--train.timeline`: its step, as it was, is put beside the plans."""
    draw: bool = False
    """Draw the mesh, what each rank does when, and its memory over time."""
    memory: bool = False
    """Tell the memory of each rank, by category."""
    measure: bool = False
    """Take three steps of the job on local ranks as well, and print what they took beside the prediction. Memory that
    ranks on CPUs share is counted in as many parts as they are."""


def main(arguments: Sequence[str]) -> int:
    """Rehearse the job that the arguments describe. Raises JobError or PlanError where the job itself would."""
    job = read_job(arguments, prog="meshwise simulate", kind=SimulateJob)
    cluster = _cluster(job)
    size = local_ranks(job) if cluster is None else cluster.ranks
    device = cluster.device.kind if cluster else "cuda" if torch.cuda.is_available() else "cpu"
    comm = chosen(job.comm) if job.measure else None
    step = read_step(job.run) if job.run else None
    plans = [job.plan, *map(Plan.parse, job.compare)]
    jobs = [prepare(dataclasses.replace(job, plan=plan), ranks=size) for plan in plans]
    shared = cluster.shared if cluster else device == "cpu"
    rehearsals = [
        rehearse(subject_of(one), plan=one.job.plan, ranks=size, device=device, shared=shared)  # type: ignore[arg-type]
        for one in jobs
    ]
    board = drawing_board()
    what = str(rehearsals[0].plan) if len(plans) == 1 else f"{len(plans)} plans"
    title = f"{what} on {job.on or counted(size, of='rank')}"
    board.print(title, highlight=False)
    if any(rehearsal.asked for rehearsal in rehearsals):
        board.print(ASKS_ITS_BATCH)
    if cluster is not None:
        _tell([predict(rehearsal, cluster=cluster) for rehearsal in rehearsals], step=step, job=job, title=title)
    if job.memory:
        for rehearsal in rehearsals:
            measured = _measured(job, size, comm) if job.measure and rehearsal is rehearsals[0] else ()
            board.show(shown(memory_table(memory_of(rehearsal), measured=measured)))
    return 0


def _tell(predictions: Sequence[Prediction], *, step: Step | None, job: SimulateJob, title: str) -> None:
    """Print and draw what is asked for of some plans on one cluster, and of a step as it was."""
    board = drawing_board()
    if len(predictions) == 1 and not (job.draw or job.wanted or step):
        board.show(shown(time_table(predictions[0])))
        return
    accounts = [predicted(prediction) for prediction in predictions]
    if step:
        accounts.append(PlanAccount(f"measured in {job.run}", step.step))
    rows = comparison_table(accounts) if len(accounts) > 1 else time_table(predictions[0])
    for first in range(1, len(rows[0]), _ABREAST):
        board.show(shown([(row[0], *row[first : first + _ABREAST]) for row in rows]))
    if job.draw:
        for drawing in drawings(accounts, width=board.width):
            board.print()
            board.show(drawing)
    save(accounts, files=job, title=title)


def _cluster(job: SimulateJob) -> Cluster | None:
    """Return the one that is named. Raises JobError when there is none and it is needed."""
    check(job)
    if job.measure and not job.memory:
        raise JobError("--measure is compared with the prediction of --memory: give --memory too")
    if not job.on:
        if job.draw or job.wanted or job.compare or job.run:
            raise JobError('times are drawn and compared on a cluster: name it, as in --on "64x8 h100"')
        if not job.memory:
            raise JobError('say what to tell: --memory, or --on a cluster, as in --on "64x8 h100"')
        return None
    try:
        return parse_cluster(job.on)
    except ClusterError as error:
        raise JobError(f"--on: {error}") from error


def _measured(job: SimulateJob, size: int, comm: Comm | None) -> Sequence[MeasuredRank]:
    """Three steps on local ranks. Where those are processes on CPUs, memory that is freed goes back at once."""
    os.environ.update(MALLOC)
    measured: Sequence[MeasuredRank] = run(size, _rank, args=(job,), comm=comm)[0]
    return measured


def subject_of(prepared: Prepared) -> RehearsalSubject:
    """Return the training of a job as a rehearsal subject, with its first global batch."""
    job, data = prepared.job, prepared.data.train
    order = SampleOrder(length(data), seed=job.train.seed)
    batch: Any = next(read(data, numbers=range(0, job.train.batch, job.train.batch), share=_everything, order=order))
    options = prepared.options(example=batch)
    return RehearsalSubject(
        prepared.model, prepared.loss, batch, prepared.optimizer, prepared.optimizer_arguments, options=options
    )


def _rank(world: World, job: SimulateJob) -> list[MeasuredRank]:
    prepared = prepare(job, ranks=world.size)
    return measure(world, subject=subject_of(prepared), plan=prepared.job.plan)


def _everything(size: int) -> tuple[int, int]:
    return 0, size


def shown(rows: Sequence[tuple[str, ...]]) -> Table:
    """Return a table for the terminal."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title, *cells in zip(*rows, strict=True):
        table.add_column(title, justify="right" if title else "left", min_width=max(map(len, cells), default=0))
    for row in rows[1:]:
        table.add_row(*row)
    return table

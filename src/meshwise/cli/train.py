"""`meshwise train`: a job on the ranks of this machine, or on those that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from rich.console import Console

from meshwise.cli.ranks import chosen, local_ranks
from meshwise.comm.launch import run, torchrun_line
from meshwise.comm.world import World
from meshwise.train.config import read_job
from meshwise.train.failure import leave_traceback
from meshwise.train.job import Job
from meshwise.train.loop import train
from meshwise.train.prepare import prepare
from meshwise.train.resume import checked_origin


def main(arguments: Sequence[str]) -> int:
    """Train the job that the arguments describe. Raises JobError or PlanError before any rank is started."""
    job = read_job(arguments, prog="meshwise train", kind=Job)
    size = local_ranks(job)
    checked_origin(prepare(job, ranks=size), attempt=None)
    words = ["-m", "meshwise", "train", *arguments]
    if "RANK" not in os.environ:
        print(f"starting {size} local rank{'s' * (size > 1)}; the same with torchrun:")
        print(f"  {torchrun_line(size, words, restarts=job.restarts)}", flush=True)
    try:
        run(size, _rank, args=(job,), restarts=job.restarts, comm=chosen(job.comm))
    finally:
        Console().show_cursor()  # A rank that is ended while it draws its progress line leaves the cursor hidden.
    return 0


def _rank(world: World, job: Job) -> None:
    # What a model draws in other ways than torch's (see model/draws) depends on this generator: a stream for each rank.
    torch.manual_seed(job.train.seed * world.size + world.rank)
    try:
        train(world, job=job)
    except Exception as error:
        leave_traceback(error, world=world)
        raise

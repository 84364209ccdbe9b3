"""Choose the number of ranks of a command and the world that joins them, from flags and environment."""

from __future__ import annotations

import math
from typing import Literal

from meshwise.comm.api.launch_environment import launched
from meshwise.comm.health.watchdog import stall_seconds_from_environment
from meshwise.comm.launch.cores import cores
from meshwise.comm.launch.joining import asked_comm
from meshwise.comm.network.torch_world import Comm
from meshwise.plan import AXES
from meshwise.train.job import Job, JobError

MOST_BY_DEFAULT = 4
"""Local ranks that `dp=auto` fills when nobody says how many; more than a laptop's cores would only slow it down."""


def chosen(comm: Comm | Literal["threads"]) -> Comm | None:
    """Return the value of `--comm` for `run`; None leaves the choice to the environment. Raises JobError when that asks
    for what there is not.
    """
    if comm == "threads":
        return None
    said = None if comm == "auto" else comm
    try:
        if said is None:
            asked_comm()
        stall_seconds_from_environment()
    except ValueError as error:
        raise JobError(str(error)) from error
    return said


def asked(ranks: int | None) -> int | None:
    """Return the local ranks that were asked for. Raises JobError for none."""
    if ranks is not None and ranks < 1:
        raise JobError(f"ranks = {ranks} has to be at least 1")
    return ranks


def launched_ranks() -> int | None:
    """Return the ranks that a launcher says it has started; None when this process is none of them. Raises JobError
    when what it says makes no sense.
    """
    try:
        told = launched()
    except ValueError as error:
        raise JobError(str(error)) from error
    return None if told is None else told.size


def local_ranks(job: Job) -> int:
    """Return the ranks of this job: torchrun's, or those asked for, or what the plan needs.

    A plan with `dp=auto` gets a rank for each core, at most four, rounded down to what its other axes allow.
    """
    if launched := launched_ranks():
        return launched
    if job.ranks is not None:
        return job.ranks
    needed: int = math.prod(getattr(job.plan, axis) or 1 for axis in AXES)
    if job.plan.dp is not None:
        return needed
    return needed * max(1, min(MOST_BY_DEFAULT, cores()) // needed)

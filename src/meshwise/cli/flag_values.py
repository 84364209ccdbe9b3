"""Values of `--ranks`, `--comm` and `--on`: the number of ranks, how they communicate, and the cluster to simulate."""

import math
from typing import Literal

from meshwise.comm.api.launch_environment import launched
from meshwise.comm.health.watchdog import stall_seconds_from_environment
from meshwise.comm.launch.cores import cores
from meshwise.comm.launch.joining import asked_comm
from meshwise.comm.network.torch_world import Comm
from meshwise.plan import AXES
from meshwise.simulate.cluster import Cluster, ClusterError, parse_cluster
from meshwise.train.job import Job, JobError

DEFAULT_RANKS = 4
"""Local ranks at most where neither the plan nor a flag says how many: more than a laptop's cores are slower."""


def checked_comm(comm: Comm | Literal["threads"]) -> Comm | None:
    """Return the value of `--comm` for `run`; None means: as MESHWISE_COMM says, and for threads.

    Raises JobError for a bad MESHWISE_COMM or MESHWISE_STALL_SECONDS.
    """
    if comm == "threads":
        return None
    try:
        if comm == "auto":
            asked_comm()
        stall_seconds_from_environment()
    except ValueError as error:
        raise JobError(str(error)) from error
    return None if comm == "auto" else comm


def checked_ranks(ranks: int | None) -> int | None:
    """Return the value of `--ranks`. Raises JobError below 1."""
    if ranks is not None and ranks < 1:
        raise JobError(f"ranks = {ranks} has to be at least 1")
    return ranks


def launched_ranks() -> int | None:
    """Return the ranks that torchrun has started; None without a launcher. Raises JobError for a half-set launcher."""
    try:
        rank = launched()
    except ValueError as error:
        raise JobError(str(error)) from error
    return None if rank is None else rank.size


def local_ranks(job: Job) -> int:
    """Return the ranks of a job: torchrun's, or those asked for, or what the plan needs.

    A plan with `dp=auto` gets a rank for each core, at most four, rounded down to what its other axes allow.
    """
    if launched := launched_ranks():
        return launched
    if job.ranks is not None:
        return job.ranks
    needed: int = math.prod(getattr(job.plan, axis) or 1 for axis in AXES)
    if job.plan.dp is not None:
        return needed
    return needed * max(1, min(DEFAULT_RANKS, cores()) // needed)


def named_cluster(name: str) -> Cluster:
    """Return the cluster of `--on`. Raises JobError for one that is not known."""
    try:
        return parse_cluster(name)
    except ClusterError as error:
        raise JobError(f"--on: {error}") from error

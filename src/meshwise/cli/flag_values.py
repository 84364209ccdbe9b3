"""Check the flags that several commands share, and fill in their defaults: `--ranks`, `--comm` and `--on`.

`run_chosen` calls the function that the first word after a command names, as in `meshwise draw mesh`. `say_start`
prints that local ranks start."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from meshwise.comm.api.job_processes import is_rank, launched_rank
from meshwise.comm.health.watchdog import stall_seconds_from_environment
from meshwise.comm.launch.connect import asked_comm
from meshwise.comm.launch.launch import cores, torchrun_line
from meshwise.comm.network.process_world import Comm
from meshwise.plan import AXES
from meshwise.simulate.cluster import Cluster, ClusterError, parse_cluster
from meshwise.train.console_output import counted
from meshwise.train.job import Job, JobError

DEFAULT_RANKS = 4
"""Most local ranks to start by default, where neither the plan nor a flag gives the number: laptops have few cores."""


def checked_comm(comm: Comm | Literal["threads"]) -> Comm | None:
    """Return the value of `--comm` as `run` expects it: None for `auto` (MESHWISE_COMM decides) and for `threads`.

    Raises JobError for a bad MESHWISE_COMM or MESHWISE_STALL_SECONDS."""
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
    """Return the value of `--ranks` unchanged; None if the flag was not given. Raises JobError for a value below 1."""
    if ranks is not None and ranks < 1:
        raise JobError(f"ranks = {ranks} has to be at least 1")
    return ranks


def launched_ranks() -> int | None:
    """Return torchrun's number of ranks; None without torchrun. Raises JobError for a bad environment."""
    try:
        _, size = launched_rank() or (0, None)
    except ValueError as error:
        raise JobError(str(error)) from error
    return size


def local_ranks(job: Job) -> int:
    """Return the number of ranks of a job: torchrun's number, else `job.ranks`, else the number that the plan needs.

    With `dp=auto` it is the number of cores, at most 4, rounded down to a multiple of what the other axes need."""
    if launched := launched_ranks():
        return launched
    if job.ranks is not None:
        return job.ranks
    needed: int = math.prod(getattr(job.plan, axis) or 1 for axis in AXES)
    if job.plan.dp is not None:
        return needed
    return needed * max(1, min(DEFAULT_RANKS, cores()) // needed)


def named_cluster(name: str) -> Cluster:
    """Return the cluster that `--on` names, as in "64x8 h100". Raises JobError for an unknown cluster."""
    try:
        return parse_cluster(name)
    except ClusterError as error:
        raise JobError(f"--on: {error}") from error


def run_chosen(
    words: Sequence[str],
    *,
    command: str,
    missing: str,
    kind: str,
    choices: Mapping[str, Callable[[Sequence[str]], None]],
) -> int:
    """Call the choice that the first word names with the other words, and return the exit status 0.

    `missing`: what to do without a word, as in "name a benchmark"; `kind`: noun for a choice. Raises JobError when the
    first word names no choice."""
    names = ", ".join(f"meshwise {command} {name}" for name in choices)
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {names}; each has --help")
        return 0
    if not words or words[0] not in choices:
        given = f"unknown {kind} {words[0]!r}" if words and not words[0].startswith("-") else missing
        raise JobError(f"{given}; choose from: {names}")
    choices[words[0]](words[1:])
    return 0


def say_start(size: int, *, words: Sequence[str], restarts: int = 0) -> None:
    """Print that local ranks start, and the torchrun command that starts the same; on a rank, print nothing.

    `words`: the words of the command line after `meshwise`."""
    if not is_rank():
        line = torchrun_line(size, ["-m", "meshwise", *words], restarts=restarts)
        print(f"starting {counted(size, of='local rank')}; the same with torchrun:\n  {line}", flush=True)

"""How many ranks a command runs on."""

from __future__ import annotations

import math
import os
import re
from typing import Literal

from meshwise.comm.torch_world import Comm
from meshwise.plan import AXES
from meshwise.train.job import Job, JobError

MOST_BY_DEFAULT = 4
"""Local ranks that `dp=auto` fills when nobody says how many; more than a laptop's cores would only slow it down."""


def chosen(comm: Comm | Literal["threads"]) -> Comm | None:
    """What `--comm` asks of a run: None leaves it to the environment."""
    return comm if comm == "local" or comm == "gloo" else None


def asked(ranks: int | None) -> int | None:
    """The local ranks that were asked for. Raises JobError for none."""
    if ranks is not None and ranks < 1:
        raise JobError(f"ranks = {ranks} has to be at least 1")
    return ranks


def launched_ranks() -> int | None:
    """The ranks that a launcher says it has started. Raises JobError when that is no number."""
    said = os.environ.get("WORLD_SIZE")
    if said is None:
        return None
    if not re.fullmatch("[1-9][0-9]{0,6}", said):
        raise JobError(f"WORLD_SIZE={said} is no number of ranks; unset it, or start the ranks with torchrun")
    return int(said)


def local_ranks(job: Job) -> int:
    """The ranks of this job: torchrun's, or those asked for, or what the plan needs.

    A plan with `dp=auto` gets a rank for each core, at most four, rounded down to what its other axes allow.
    """
    if launched := launched_ranks():
        return launched
    if job.ranks is not None:
        return job.ranks
    needed: int = math.prod(getattr(job.plan, axis) or 1 for axis in AXES)
    if job.plan.dp is not None:
        return needed
    return needed * max(1, min(MOST_BY_DEFAULT, os.cpu_count() or 1) // needed)

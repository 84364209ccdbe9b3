"""`meshwise train`: a job on the ranks of this machine, or on those that torchrun has started."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Sequence

import torch
from rich.console import Console

from meshwise.cli.rank_count import chosen, local_ranks
from meshwise.cli.simulate_command import subject_of
from meshwise.comm.api.launch_environment import is_rank
from meshwise.comm.api.rank_lost import RankKilledError
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run, torchrun_line
from meshwise.memory.memory_error import is_shortage
from meshwise.simulate.available_memory import room_left
from meshwise.simulate.fitting_plans import MemoryNeeds, ShortageError, shortage
from meshwise.train.counted import counted
from meshwise.train.failure_report import leave_traceback
from meshwise.train.job import Job
from meshwise.train.job_config import read_job
from meshwise.train.loop import train
from meshwise.train.output_stream import tolerate
from meshwise.train.prepare import Prepared, check_plan, prepare
from meshwise.train.resume import checked_origin


def main(arguments: Sequence[str]) -> int:
    """Train the job that the arguments describe. Raises JobError or PlanError before any rank is started."""
    job = read_job(arguments, prog="meshwise train", kind=Job)
    size, comm = local_ranks(job), chosen(job.comm)
    prepared = prepare(job, ranks=size)
    checked_origin(prepared, attempt=None)
    words = ["-m", "meshwise", "train", *arguments]
    if not is_rank():
        check_plan(prepared)
        print(f"starting {counted(size, of='local rank')}; the same with torchrun:")
        print(f"  {torchrun_line(size, words, restarts=job.restarts)}", flush=True)
    try:
        run(size, _rank, args=(job,), restarts=job.restarts, comm=comm)
    except RankKilledError as error:
        if (answer := _killed(error, prepared, size=size)) is None:
            raise
        raise answer from error
    finally:
        Console().show_cursor()  # A rank that is ended while it draws its progress line leaves the cursor hidden.
    return 0


def _rank(world: World, job: Job) -> None:
    tolerate()
    # What a model draws in other ways than torch's (see model/draws) depends on this generator: a stream for each rank.
    torch.manual_seed(job.train.seed * world.size + world.rank)
    short: Exception | None = None
    try:
        train(world, job=job)
    except Exception as error:
        leave_traceback(error, world=world)
        if not is_shortage(error):
            raise
        short = error
    if short is not None:
        raise _answered(short, world, job)


def _answered(error: Exception, world: World, job: Job) -> ShortageError:
    """Return the error for a rank that ran out of memory, with a plan that fits; called after its tensors are freed."""
    held = error.held if isinstance(error, ShortageError) else {}
    seen: BaseException | None = error
    while seen is not None:
        # What the frames of a traceback held is free when it goes; it has been written to a file.
        seen = seen.with_traceback(None).__cause__ or seen.__context__
    gc.collect()
    prepared = prepare(job, ranks=world.size)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    room = room_left(world.device, ranks=here, held=sum(held.values()))
    needs = MemoryNeeds(subject_of(prepared), ranks=world.size, shared=here == world.size)
    answer = shortage(needs, plan=prepared.job.plan, room=room, held=held)
    return ShortageError(f"rank {world.rank} has no memory left: {error}\n{answer}", held=held)


def _killed(error: RankKilledError, prepared: Prepared, *, size: int) -> ShortageError | None:
    """Return the memory shortage that made the system kill a CPU rank, or None if there was enough memory."""
    plan, needs = prepared.job.plan, MemoryNeeds(subject_of(prepared), ranks=size, shared=True)
    room = room_left(torch.device("cpu"), ranks=size)
    if needs.device != "cpu" or not room < needs.total(plan) < math.inf:
        return None
    answer = shortage(needs, plan=plan, room=room, held={})
    return ShortageError(f"{error}, as the system ends what takes more memory than there is\n{answer}", held={})

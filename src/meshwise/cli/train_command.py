"""The command `meshwise train`: train a job on local ranks, or on the ranks that torchrun has started."""

import gc
import math
import os
from collections.abc import Sequence

import torch
from rich.console import Console

from meshwise.cli.shared_flags import checked_comm, local_ranks, say_start
from meshwise.comm.api.launcher_info import RankKilledError, is_rank
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run
from meshwise.memory.malloc_options import is_out_of_memory
from meshwise.simulate.predicted_memory import MemoryNeeds, ShortageError, memory_advice, room_left
from meshwise.train.console_output import leave_traceback, replace_missing_characters
from meshwise.train.flags_and_toml import read_job
from meshwise.train.job_settings import Job
from meshwise.train.loop import train
from meshwise.train.prepare_job import PreparedJob, check_plan, prepare
from meshwise.train.run_checkpoints import checked_run_start


def main(arguments: Sequence[str]) -> int:
    """Train the job that the arguments describe, and return the exit status 0. Raises JobError or PlanError before any
    rank starts, ShortageError when a rank runs out of memory, and otherwise the error of the first rank that failed."""
    job = read_job(arguments, prog="meshwise train", kind=Job)
    size, comm = local_ranks(job), checked_comm(job.comm)
    prepared = prepare(job, ranks=size)
    checked_run_start(prepared, attempt=None)
    if not is_rank():
        check_plan(prepared)
    say_start(size, words=["train", *arguments], restarts=job.restarts)
    try:
        run(size, _rank, args=(job,), restarts=job.restarts, comm=comm)
    except RankKilledError as error:
        if (shortage_error := _killed_for_memory(error, prepared, size=size)) is None:
            raise
        raise shortage_error from error
    finally:
        Console().show_cursor()  # a rank that is killed while it draws its progress line leaves the cursor invisible
    return 0


def _rank(world: World, job: Job) -> None:
    replace_missing_characters()
    # torch's own random functions are seeded elsewhere. This seed, different on each rank, is for all other functions.
    torch.manual_seed(job.train.seed * world.size + world.rank)
    out_of_memory: Exception | None = None
    try:
        train(world, job=job)
    except Exception as error:
        leave_traceback(error, world=world)
        if not is_out_of_memory(error):
            raise
        out_of_memory = error
    if out_of_memory is not None:
        raise _with_fitting_plan(out_of_memory, world, job)


def _with_fitting_plan(error: Exception, world: World, job: Job) -> ShortageError:
    """Return an error with a plan that fits, for a rank that ran out of memory. Frees the tensors of the failed run."""
    used = error.used if isinstance(error, ShortageError) else {}
    seen: BaseException | None = error
    while seen is not None:
        # The frames of a traceback keep tensors alive. The traceback has been written to a file already.
        seen = seen.with_traceback(None).__cause__ or seen.__context__
    gc.collect()
    prepared = prepare(job, ranks=world.size)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    room = room_left(world.device, ranks=here, used=sum(used.values()))
    needs = MemoryNeeds(prepared.rehearsal_subject(), ranks=world.size, shared=here == world.size)
    advice = memory_advice(needs, plan=prepared.job.plan, room=room, used=used)
    return ShortageError(f"rank {world.rank} has no memory left: {error}\n{advice}", used=used)


def _killed_for_memory(error: RankKilledError, prepared: PreparedJob, *, size: int) -> ShortageError | None:
    """Return an error with a plan that fits if the prediction says that a killed CPU rank lacked memory, else None."""
    plan, needs = prepared.job.plan, MemoryNeeds(prepared.rehearsal_subject(), ranks=size, shared=True)
    room = room_left(torch.device("cpu"), ranks=size)
    if needs.device != "cpu" or not room < needs.total(plan) < math.inf:
        return None
    advice = memory_advice(needs, plan=plan, room=room, used={})
    return ShortageError(f"{error}, probably by the system for lack of memory\n{advice}", used={})

"""Run the functions of a lesson on four ranks: as threads of this process, or on the processes of a launcher.

    | run_plain(main)   `main(group)` on each rank, with a plain process group of torch.distributed over gloo
    | run_mesh(main)    `main(world)` on each rank, with a world of meshwise
    | show(picture)     a picture of meshwise for the page of the lesson

Both runs return the results of all ranks, by rank. Ranks are threads if a lesson is started as an ordinary program.
Under torchrun, and under `meshwise lesson 04 --processes`, every rank runs the whole lesson, and a run calls `main`
once on each of them."""

import os
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import meshwise as mw
from meshwise.testing import run
from meshwise.view.picture import svg_file

RANKS = 4
PROCESSES = int(os.environ.get("WORLD_SIZE", "1")) > 1
"""Whether a launcher has started this process as one of several ranks."""


def run_plain(main, *, size=RANKS):
    """Return the results of `main(group)` by rank. Raises the first error of a rank."""
    if PROCESSES:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return _exchanged(main(dist.group.WORLD))
    results, errors, store = {}, {}, dist.HashStore()

    def rank_main(rank):
        group = _group_of_thread(store, rank, size)
        try:
            results[rank] = main(group)
        except BaseException as error:  # raised below, in the thread of the caller
            errors[rank] = error
            group.abort()
        finally:
            distributed_c10d._world.pg_group_ranks.pop(group, None)

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not errors:
        threads[0].join(0.01)
        for thread in threads[1:]:
            thread.join(0.01)
    for rank, error in errors.items():
        error.add_note(f"on rank {rank}")
        raise error
    return [results[rank] for rank in range(size)]


def run_mesh(main, *, size=RANKS):
    """Return the results of `main(world)` by rank. Raises the first error of a rank."""
    if PROCESSES:
        return _exchanged(main(mw.connect()))
    return run(size, main)


def _exchanged(result):
    """Return the results of all ranks of the launcher, by rank."""
    return mw.connect().exchange(result)


def _group_of_thread(store, rank, size):
    """Return a process group of one thread. torch has one default group for each process, so it cannot be used here;
    the table of ranks is what `dist.isend` and `dist.irecv` look up."""
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


def show(picture):
    """Write a picture into the folder that `meshwise lesson --html` and the site read; print nothing."""
    if folder := os.environ.get("MESHWISE_LESSON_PICTURES"):
        number = len(list(Path(folder).glob("*.svg")))
        (Path(folder) / f"{number:02}.svg").write_text(svg_file(picture), encoding="utf-8")

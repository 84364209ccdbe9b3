"""Join the ranks that torchrun or `run` has started: one world for each device, watched and closed at exit."""

import atexit
import contextlib
import functools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import cast, get_args

import torch
from torch.distributed import distributed_c10d as c10d

from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.process_life import LauncherProcess
from meshwise.comm.api.rank_lost import RankLostError
from meshwise.comm.api.streams import gpu_count, streams_of
from meshwise.comm.api.world import World
from meshwise.comm.health.watchdog import ReportSink, Watchdog, report_to_stderr
from meshwise.comm.network.loopback import is_opened_by_launcher
from meshwise.comm.network.torch_world import COMM_VARIABLE, Comm, default_device, meeting_place, torch_world

_LEAVING_TIME = timedelta(seconds=5)


def connect(
    *, device: torch.device | str | None = None, stall_seconds: float | None = None, comm: Comm | None = None
) -> World:
    """Return the world of this process, over the mesh `rank=N` of all its ranks. Every rank of the job calls it.

    `device`: where this rank's tensors are; by default the GPU with its local number, or the CPU. The same device gives
    the same world again. It is watched (see `watchdog`, also for `stall_seconds`) and closed at exit at the latest;
    once closed it stays closed. `comm`: how CPU ranks of one host are joined, `local` (shared memory), `gloo`, or
    `auto`; by default the environment variable MESHWISE_COMM, else `auto`.

    Raises ValueError when some ranks are on CPU and others on CUDA, when `local` is impossible, when a requested GPU is
    missing, or when the environment is incomplete. Raises torch's DistError when ranks stay away for ten minutes.
    """
    with joined_by(comm):
        return joined(device, stall_seconds=stall_seconds, sink=report_to_stderr)


def joined(
    device: torch.device | str | None, *, stall_seconds: float | None = None, sink: ReportSink = report_to_stderr
) -> World:
    """Connect as `connect` does; `sink` receives the reports of the watchdog."""
    wanted = default_device() if device is None else torch.device(device)
    if wanted.type == "cuda":
        if not gpu_count():
            raise ValueError(f"device={str(device)!r}, and torch finds no GPU here: leave the device out for CPUs")
        wanted = torch.device("cuda", default_device().index if wanted.index is None else wanted.index)
        streams_of(wanted).select()
    worlds = _worlds()
    if wanted not in worlds:
        worlds[wanted] = _join(wanted, stall_seconds, sink)
    return worlds[wanted]


@functools.cache
def _worlds() -> dict[torch.device, World]:
    """Return the worlds this process has joined. A process is one rank, whichever code asks."""
    return {}


def _join(device: torch.device, stall_seconds: float | None, sink: ReportSink) -> World:
    store = meeting_place()
    world = torch_world(device, store=store, comm=asked_comm())
    watch = None
    if store is not None:
        launcher = LauncherProcess() if "TORCHELASTIC_RUN_ID" in os.environ else None
        own = c10d.PrefixStore(device.type, store)
        watch = Watchdog(world, store=own, stall_seconds=stall_seconds, sink=sink, launcher=launcher)
        watch.start()
        if not is_opened_by_launcher():
            atexit.register(_leave_store, own, rank=world.rank, size=world.size)
        atexit.register(watch.stop)
    # Runs before the watch stops: what is still under way is waited for, and watched.
    atexit.register(_close, world, watch)
    return world


def leave_undone() -> None:
    """Leave the collectives under way unfinished: this rank ends, and its launcher ends the others."""
    atexit.unregister(_close)


def _close(world: World, watch: Watchdog | None) -> None:
    """Close at exit. A lost rank has been reported by then, or does not matter any more. A disagreement has not been
    reported, and an exception at exit would end the process with status 0.
    """
    try:
        with contextlib.suppress(RankLostError):
            world.close()
    except RanksDisagree as error:
        assert watch is not None, "there are others"
        watch.failed(error)


def asked_comm() -> Comm:
    """Return how the environment asks to join ranks. Raises ValueError for an unknown way."""
    named = os.environ.get(COMM_VARIABLE) or "auto"
    return _known(named, source=f"{COMM_VARIABLE}={named}")


def _known(named: str, *, source: str) -> Comm:
    for comm in get_args(Comm):
        if named == comm:
            return cast(Comm, comm)
    raise ValueError(f"{source}: ranks of one host are joined by {', '.join(get_args(Comm))}")


@contextlib.contextmanager
def joined_by(comm: Comm | None) -> Iterator[None]:
    """Set `comm` in the environment inside the block, for the processes started there. Raises ValueError for an unknown
    way.
    """
    kept = os.environ.get(COMM_VARIABLE)
    asked_comm() if comm is None else _known(comm, source=f"comm={comm!r}")
    if comm is not None:
        os.environ[COMM_VARIABLE] = comm
    try:
        yield
    finally:
        if kept is not None:
            os.environ[COMM_VARIABLE] = kept
        elif comm is not None:
            del os.environ[COMM_VARIABLE]


def _leave_store(store: c10d.Store, *, rank: int, size: int) -> None:
    """Leave a store that rank 0's process opened: rank 0 leaves last, or the last messages of the others would fail."""
    with contextlib.suppress(RuntimeError):
        if store.add("left", 1) == size:
            store.set("all left", "")
        if rank == 0:
            store.wait(["all left"], _LEAVING_TIME)

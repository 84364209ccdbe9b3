"""Connect this process, a rank that torchrun or `run` has started, with the other ranks: `connect` returns its World.

A process has one world for each device, closed when the process exits. A world of several ranks has a watchdog."""

import atexit
import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import cast, get_args

import torch
from torch.distributed import distributed_c10d as c10d

from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.launcher_info import LauncherProcess, RankLostError
from meshwise.comm.api.streams import gpu_count, streams_of
from meshwise.comm.api.world import World
from meshwise.comm.health.watchdog import ReportSink, Watchdog, report_to_stderr
from meshwise.comm.network.choose_world import COMM_VARIABLE, Comm, default_device, process_world
from meshwise.comm.network.job_store import is_opened_by_launcher, job_store


def connect(*, device: torch.device | str | None = None, comm: Comm | None = None) -> World:
    """Return the world of this process, over the mesh `rank=N` of all N ranks of the job. Every rank calls `connect`.

    | device   device of this rank's tensors; None for GPU number LOCAL_RANK, or the CPU without GPUs. A second call for
    |          the same device returns the same world, even if it was closed
    | comm     how CPU ranks of one host communicate: `local` (shared memory), `gloo`, or `auto`; None for the value of
    |          MESHWISE_COMM, or `auto` without this variable

    The world is closed at exit. Raises ValueError when ranks are on CPU and on CUDA, `local` is impossible, a requested
    GPU is missing, or the environment is incomplete. Raises torch's DistError when ranks are missing."""
    with comm_setting(comm):
        return connected_world(device)


def connected_world(device: torch.device | str | None, *, sink: ReportSink = report_to_stderr) -> World:
    """Return the world of this process as `connect` does. sink: receives the reports of the watchdog."""
    wanted = default_device() if device is None else torch.device(device)
    if wanted.type == "cuda":
        if not gpu_count():
            raise ValueError(f"device={str(device)!r}, but torch finds no GPU here: leave `device` out to use CPUs")
        wanted = torch.device("cuda", default_device().index if wanted.index is None else wanted.index)
        streams_of(wanted).select()
    worlds = _worlds(os.getpid())
    if wanted not in worlds:
        worlds[wanted] = _join(wanted, sink)
    return worlds[wanted]


@functools.cache
def _worlds(pid: int) -> dict[torch.device, World]:  # noqa: ARG001 - the key of the cache
    """Return the worlds of this process by device. pid: its PID, so that a fork of it begins without worlds."""
    return {}


def has_world() -> bool:
    """Return whether this process has joined a world, such as a notebook that has made a trainer."""
    return bool(_worlds(os.getpid()))


def _join(device: torch.device, sink: ReportSink) -> World:
    store = job_store()
    world = process_world(device, store=store, comm=comm_from_environment())
    watch = None
    if store is not None:
        launcher = LauncherProcess() if "TORCHELASTIC_RUN_ID" in os.environ else None
        own = c10d.PrefixStore(device.type, store)
        watch = Watchdog(world, store=own, sink=sink, launcher=launcher)
        watch.start()
        if not is_opened_by_launcher():
            atexit.register(_leave_store, own, rank=world.rank, size=world.size)
        atexit.register(watch.stop)
    # Runs before `watch.stop`, so the watchdog still watches while the last collectives are finished.
    atexit.register(_close, world, watch)
    return world


def skip_close_at_exit() -> None:
    """Do not close the worlds at exit, because `close` waits for the other ranks. The launcher ends those ranks."""
    atexit.unregister(_close)


def _close(world: World, watch: Watchdog | None) -> None:
    """Close the world at exit. A disagreement is reported here, with exit status 1: an exception at exit would give 0.
    The loss of a rank is ignored, unless the end of the job was declared: that gives exit status 1 too."""
    try:
        world.close()
    except (RankLostError, RanksDisagree) as error:
        assert watch is not None, "only a world of several ranks can fail so"
        if isinstance(error, RanksDisagree):
            watch.failed(error)
        watch.end_if_declared()


def comm_from_environment() -> Comm:
    """Return the value of MESHWISE_COMM, or `auto` without it. Raises ValueError for an unknown value."""
    named = os.environ.get(COMM_VARIABLE) or "auto"
    return _known(named, source=f"{COMM_VARIABLE}={named}")


def _known(named: str, *, source: str) -> Comm:
    if named not in (ways := get_args(Comm)):
        raise ValueError(f"{source} is unknown; the ways to connect the ranks of one host are {', '.join(ways)}")
    return cast(Comm, named)


def comm_setting(comm: Comm | None) -> AbstractContextManager[None]:
    """Set MESHWISE_COMM to `comm` inside the block (None: unchanged). Raises ValueError for an unknown value."""
    asked = comm_from_environment() if comm is None else _known(comm, source=f"comm={comm!r}")
    return environment({COMM_VARIABLE: asked})


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, and restore them after it."""
    kept = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _leave_store(store: c10d.Store, *, rank: int, size: int) -> None:
    """Let rank 0, which has opened the store, wait until all ranks exit, because they use the store; at most 5 s."""
    with contextlib.suppress(RuntimeError):
        if store.add("left", 1) == size:
            store.set("all left", "")
        if rank == 0:
            store.wait(["all left"], timedelta(seconds=5))

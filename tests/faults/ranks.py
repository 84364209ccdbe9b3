"""Real ranks with something that ends them: forked from a server that has imported everything, so a run takes a second.

A fault is injected from outside, at a place that is counted and not timed: the n-th collective of a rank, the n-th file
that it opens or renames among the checkpoints (Python's own audit events), and a few random milliseconds later."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from meshwise.comm.api.flight_recorder import CallRecord, FlightRecorder
from meshwise.comm.launch.connect import connect
from meshwise.comm.network.job_store import LOOPBACK, loopback_store
from meshwise.train.job_settings import Job
from meshwise.train.loop import train

# Of a rank that is stopped; where none is, a disk may take its time.
STALL_SECONDS = 12.0
PATIENT_SECONDS = 100.0
# The watch needs a third of what is said; a machine with other work to do may take all of it.
REPORT_SECONDS = 60.0
RUN_SECONDS = 200.0
_SERVER = multiprocessing.get_context("forkserver")
# torch imports its compiler with the first optimizer, which is most of what a rank would do here.
_SERVER.set_forkserver_preload(["torch._dynamo", "faults.ranks"])


@dataclass(frozen=True)
class Fault:
    """What happens to which rank. count: at which of its calls; delay: so many seconds after it.

    step       killed at a collective          save     killed at the opening of a file among the checkpoints
    publish    killed at a rename among them    stop     stopped (SIGSTOP) at a collective
    raise      an exception at a collective     disk     no file of any rank may grow beyond `count` bytes"""

    kind: str
    rank: int = 0
    count: int = 0
    delay: float = 0.0


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit statuses by rank, seconds from the first end to the last, what the ranks printed."""

    statuses: tuple[int | None, ...]
    seconds: float
    output: str

    @property
    def well(self) -> bool:
        """Whether it came to its end."""
        return set(self.statuses) == {0}


def run_ranks(job: Job, *, size: int, log: Path, fault: Fault | None = None) -> Ended:
    """Run the job on forked ranks with a fault, and end them all as a launcher does when one has ended.

    A stopped rank does not end: then it is the others that have to notice, within REPORT_SECONDS."""
    store = loopback_store()
    logs = [log.with_name(f"{log.name}-{rank}") for rank in range(size)]
    processes: list[BaseProcess] = [
        _SERVER.Process(target=_rank, args=(rank, size, store.port, job, logs[rank], fault)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        connection.wait([process.sentinel for process in processes], RUN_SECONDS)
        first = time.monotonic()
        waited = [process for process in processes if fault is None or fault.kind != "stop" or process.exitcode is None]
        left = fault is not None and fault.kind in ("step", "save", "publish", "stop")  # a rank that the launcher ends
        patience = 1.0 if left and any(process.exitcode for process in processes) else REPORT_SECONDS
        while time.monotonic() - first < patience and any(process.exitcode is None for process in waited):
            connection.wait([process.sentinel for process in processes if process.exitcode is None], 0.1)
        return Ended(
            tuple(process.exitcode for process in processes),
            time.monotonic() - first,
            "".join(path.read_text() for path in logs if path.exists()),
        )
    finally:
        for process in processes:
            process.kill()
            process.join()


# ---- in a rank -----------------------------------------------------------------------------------------------------


def _rank(rank: int, size: int, port: int, job: Job, log: Path, fault: Fault | None) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": LOOPBACK,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MESHWISE_STALL_SECONDS": str(STALL_SECONDS if fault is not None and fault.kind == "stop" else PATIENT_SECONDS),
    }
    world = connect(device="cpu")
    with _armed(fault, rank):
        try:
            train(world, job=job, console=Console(file=io.StringIO()))
        except Exception:
            sys.excepthook(*sys.exc_info())
            raise
    world.close()


def _armed(fault: Fault | None, rank: int) -> contextlib.AbstractContextManager[Any]:
    """The fault, waiting for its moment."""
    if fault is not None and fault.kind == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.count, fault.count))
    if fault is None or fault.rank != rank or fault.kind == "disk":
        return contextlib.nullcontext()
    strike = _counted(fault, _blow(fault))
    if fault.kind in ("save", "publish"):
        event = {"save": "open", "publish": "os.rename"}[fault.kind]

        def hook(name: str, args: tuple[Any, ...]) -> None:
            if name == event and isinstance(args[0], str | Path) and "checkpoints" in str(args[0]):
                strike()

        sys.addaudithook(hook)
        return contextlib.nullcontext()
    write = FlightRecorder.write

    def counted(flight_recorder: FlightRecorder, record: CallRecord, *, ranks: tuple[int, ...]) -> None:
        strike()
        write(flight_recorder, record, ranks=ranks)

    return mock.patch.object(FlightRecorder, "write", counted)


def _counted(fault: Fault, blow: Callable[[], None]) -> Callable[[], None]:
    calls = 0

    def strike() -> None:
        nonlocal calls
        calls += 1
        if calls == fault.count:
            if fault.delay and fault.kind != "raise":
                threading.Timer(fault.delay, blow).start()
            else:
                blow()

    return strike


def _blow(fault: Fault) -> Callable[[], None]:
    def blow() -> None:
        if fault.kind == "raise":
            raise ConnectionError("a fault of the campaign")
        os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)

    return blow

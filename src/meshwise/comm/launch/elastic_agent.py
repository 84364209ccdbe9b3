"""Run the ranks of one machine with torch's elastic launcher, with three changes.

1. A rank that ends with status 0 and without a result counts as failed. torch's launcher waits until every rank has
   returned a result or one rank has failed. So it would wait for ever after `os._exit(0)`, or `exit` in a C library.
   torch learns of a failed process only a moment after its end. So if a rank ended a second ago and torch does not
   report it as failed, its status was 0.
2. When a rank ends without an outcome, the other ranks get 2 s to report the collective in which they lost it.
   torch's launcher would end them at once.
3. Ranks need semaphores. If a container has no room for them, the error says what to change."""

import errno
import os
import time
import uuid
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from meshwise.comm.api.process_life import has_ended
from meshwise.comm.launch.rank_outcome import RankOutcome, last_start, save_statuses
from meshwise.comm.launch.rank_process import POLL_SECONDS
from meshwise.comm.network.loopback_store import LOOPBACK, LoopbackRendezvous

_SHUTDOWN_SECONDS = 5
_CERTAIN_SECONDS = 1.0
_WORDS_SECONDS = 2.0
_REFUSED = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSYS)
_NO_ROOM = (
    "starting ranks needs semaphores in /dev/shm: 2 per rank and 5 more, a page each; give /dev/shm room "
    "(mount -o remount,rw,size=64m /dev/shm, or docker run --shm-size=64m), or start the ranks with torchrun, which "
    "needs no semaphores"
)


class NoSemaphoresError(OSError):
    """Raised when /dev/shm has no room for the semaphores of the ranks."""


def launch(
    main: Callable[..., Any], *, args: tuple[Any, ...], size: int, restarts: int, method: str, folder: Path
) -> Mapping[int, int]:
    """Call `main(*args)` in `size` processes, wait until all have ended, and return the exit statuses of failed ranks.

    The statuses are by rank; if a signal ended a rank, its status is minus the number of the signal.

    | restarts   how many times all ranks are started again after one failed
    | method     start method of multiprocessing
    | folder     folder of the job, in which the ranks save their outcomes

    Raises NoSemaphoresError. After a signal, raises torch's SignalException when all ranks have ended."""
    rendezvous = LoopbackRendezvous(uuid.uuid4().hex)
    logs = DefaultLogsSpecs(log_dir=str(folder / "logs"))
    spec = WorkerSpec(
        role="default_role",
        local_world_size=size,
        entrypoint=main,
        args=args,
        rdzv_handler=rendezvous,
        max_restarts=restarts,
        monitor_interval=POLL_SECONDS,
        local_addr=LOOPBACK,
        # torch chooses the cores that are near each GPU.
        numa_options=LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=size, logs_specs=logs).numa_options,
    )
    try:
        result = _Agent(spec, logs=logs, method=method, folder=folder).run()
    finally:
        rendezvous.shutdown()
    return {rank: failure.exitcode for rank, failure in result.failures.items()}


class _Agent(LocalElasticAgent):
    """torch's elastic agent for one machine, with the changes that this file describes."""

    def __init__(self, spec: WorkerSpec, *, logs: DefaultLogsSpecs, method: str, folder: Path) -> None:
        super().__init__(spec, logs, start_method=method, shutdown_timeout=_SHUTDOWN_SECONDS)
        self._folder = folder
        self._gone: Set[int] = frozenset()
        self._since = 0.0
        self._silent: Set[int] = frozenset()
        self._silent_since = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._pcontext = None  # frees the semaphores of the last start before the next start makes new ones
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        except OSError as error:
            if error.errno in _REFUSED and error.filename is None:  # multiprocessing names no file for semaphores
                raise NoSemaphoresError(error.errno, f"{os.strerror(error.errno)}: {_NO_ROOM}") from error
            raise
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        known, self._gone = self._gone, {one.id for one in worker_group.workers if _is_gone(one.id)}
        if known != self._gone:
            self._since = time.monotonic()
        if self._may_yet_tell(worker_group):
            return RunResult(WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY and (failures := self._left_nothing(worker_group)):
            result = RunResult(WorkerState.FAILED, failures=failures)
        if result.failures:  # the ranks of the next start print these statuses as the reason
            statuses = {rank: failure.exitcode for rank, failure in result.failures.items()}
            save_statuses(last_start(self._folder), statuses=statuses)
        return result

    def _left_nothing(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Return a failure for each rank that has certainly ended with status 0 and has saved no outcome."""
        if time.monotonic() - self._since < _CERTAIN_SECONDS:
            return {}
        outcomes = last_start(self._folder)
        return {
            one.global_rank: ProcessFailure(one.local_rank, pid=one.id, exitcode=0, error_file="")
            for one in worker_group.workers
            if one.id in self._gone and not RankOutcome.exists(outcomes, rank=one.global_rank)
        }

    def _may_yet_tell(self, worker_group: WorkerGroup) -> bool:
        """Return whether a rank ended without an outcome less than 2 s ago, while another rank may still save one."""
        outcomes = last_start(self._folder)
        quiet = {one.id for one in worker_group.workers if not RankOutcome.exists(outcomes, rank=one.global_rank)}
        known, self._silent = self._silent, {process for process in quiet if has_ended(process)}
        if known != self._silent:
            self._silent_since = time.monotonic()
        return 0 < len(self._silent) < len(quiet) and time.monotonic() - self._silent_since < _WORDS_SECONDS


def _is_gone(process: int) -> bool:
    """Return whether the process has ended and its parent has collected it."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False

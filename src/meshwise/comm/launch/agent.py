"""torch's launcher, which here also notices a rank that ended well and left no result.

It waits until every rank has returned something or one has failed. A rank that ends with status 0 in another way (by
`os._exit(0)`, or a library that calls C's `exit`) does neither, and the launcher would wait for ever. Here that is a
failure of the rank, so the others are ended, and all are started again where that was asked for.

torch learns the exit status of a process a moment after its end. So ranks that ended a second ago, and are no failure
to torch, ended with status 0.

When a rank ends without a word, those that wait for it notice, and say in which collective they lost it. torch's
launcher would end them at once; here they are given a moment for that.

To start ranks takes semaphores. Where a container has no room for them, the error says what to change.
"""

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
from meshwise.comm.network.loopback import LOOPBACK, LoopbackRendezvous

_SHUTDOWN_SECONDS = 5
_CERTAIN_SECONDS = 1.0
_WORDS_SECONDS = 2.0
_REFUSED = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSYS)
_NO_ROOM = (
    "to start ranks takes semaphores in /dev/shm, two for each and five, of a page each; give it room "
    "(mount -o remount,rw,size=64m /dev/shm, or docker run --shm-size=64m), or start the ranks with torchrun, which "
    "needs none"
)


class NoSemaphoresError(OSError):
    """Raised when the machine has no room for the semaphores of a job."""


def launch(
    main: Callable[..., Any], *, args: tuple[Any, ...], size: int, restarts: int, method: str, folder: Path
) -> Mapping[int, int]:
    """Call `main(*args)` in `size` processes and wait for all of them. Returns the statuses of those that failed, by
    rank: of one that a signal ended, less than 0.

    method: how multiprocessing starts them. folder: where they leave their outcomes. Raises torch's SignalException for
    a signal that it handles, when all have ended.
    """
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
        # torch's choice of the cores that are near each GPU.
        numa_options=LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=size, logs_specs=logs).numa_options,
    )
    try:
        result = _Agent(spec, logs=logs, method=method, folder=folder).run()
    finally:
        rendezvous.shutdown()
    return {rank: failure.exitcode for rank, failure in result.failures.items()}


class _Agent(LocalElasticAgent):
    """Agent for the ranks of one machine."""

    def __init__(self, spec: WorkerSpec, *, logs: DefaultLogsSpecs, method: str, folder: Path) -> None:
        super().__init__(spec, logs, start_method=method, shutdown_timeout=_SHUTDOWN_SECONDS)
        self._folder = folder
        self._gone: Set[int] = frozenset()
        self._since = 0.0
        self._silent: Set[int] = frozenset()
        self._silent_since = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._pcontext = None  # or the semaphores of the ranks before would take their room until these are started
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
        if result.failures:  # those that are started after them say why
            statuses = {rank: failure.exitcode for rank, failure in result.failures.items()}
            save_statuses(last_start(self._folder), statuses=statuses)
        return result

    def _left_nothing(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Return the ranks that have ended with status 0, for certain, and left no result."""
        if time.monotonic() - self._since < _CERTAIN_SECONDS:
            return {}
        outcomes = last_start(self._folder)
        return {
            one.global_rank: ProcessFailure(one.local_rank, pid=one.id, exitcode=0, error_file="")
            for one in worker_group.workers
            if one.id in self._gone and not RankOutcome.is_there(outcomes, rank=one.global_rank)
        }

    def _may_yet_tell(self, worker_group: WorkerGroup) -> bool:
        """Return whether a rank has ended without a word just now, and one that lives has said nothing yet."""
        outcomes = last_start(self._folder)
        quiet = {one.id for one in worker_group.workers if not RankOutcome.is_there(outcomes, rank=one.global_rank)}
        known, self._silent = self._silent, {process for process in quiet if _has_ended(process)}
        if known != self._silent:
            self._silent_since = time.monotonic()
        return 0 < len(self._silent) < len(quiet) and time.monotonic() - self._silent_since < _WORDS_SECONDS


def _has_ended(process: int) -> bool:
    try:
        return has_ended(process)
    except PermissionError:  # it has become another user
        return False


def _is_gone(process: int) -> bool:
    """Return whether the process has ended and its parent has collected it."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it has become another user
        return False
    return False

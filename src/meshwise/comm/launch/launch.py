"""Start the ranks of a job on this machine, run a function on each, and return the results: `run`.

`run` uses the elastic launcher of torchrun. In a process that torchrun has started, `run` only connects this rank. So
one script works with `python` and with torchrun.

    run ── launch ─────────── rank_process ────────────── connect ──────── main(world, …)
     │     torch's launcher   one rank, start to end      its world
     └─ results, first_error: what `main` returned, or the first error (not the errors that it caused in other ranks)

`launch` changes torch's elastic launcher in three ways. A rank that ends with status 0 and without a result counts as
failed (docs/faults.md, "Detection"). When a rank ends without an outcome, the others get 2 s to report the collective
that it did not join. Ranks need semaphores: if a container has no room for them, the error says what to change."""

import contextlib
import errno
import functools
import logging
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig

from meshwise.comm.api.launcher_info import has_ended, launched_rank
from meshwise.comm.api.streams import cuda_in_use
from meshwise.comm.health.watchdog import report_to_stderr, stall_seconds_from_environment
from meshwise.comm.launch.connect import comm_setting, connect, environment, has_world, skip_close_at_exit
from meshwise.comm.launch.fork_server import LauncherEnvironment, start_context
from meshwise.comm.launch.rank_process import (
    POLL_SECONDS,
    SIGNALS,
    RankOutcome,
    first_error,
    last_start,
    rank_main,
    results,
    start_folder,
    threads_from_environment,
)
from meshwise.comm.network.choose_world import Comm
from meshwise.comm.network.job_store import LOOPBACK, LoopbackRendezvous

_LOUD = ("torch.distributed.elastic", "torch.multiprocessing")  # their log messages are switched off
_SHARE = Path("/sys/fs/cgroup/cpu.max")
_CERTAIN_SECONDS = 1.0  # for change 1 of this file
_WORDS_SECONDS = 2.0  # for change 2
_REFUSED = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSYS)
_NO_ROOM = (
    "starting ranks needs semaphores in /dev/shm: 2 per rank and 5 more, a page each; give /dev/shm room "
    "(mount -o remount,rw,size=64m /dev/shm, or docker run --shm-size=64m), or start the ranks with torchrun, which "
    "needs no semaphores"
)


def run(
    size: int,
    main: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    device: str | None = None,
    restarts: int = 0,
    comm: Comm | None = None,
) -> list[Any]:
    """Call `main(world, *args)` on `size` ranks and return the results of `main`, by rank.

    Starts `size` processes on this machine, and ends them. Under torchrun, `run` only connects this process, and
    returns the results of all ranks. `main` (or a functools.partial of it), `args` and results are pickled: define it
    at the top of a file, and call `run` under `if __name__ == "__main__":`. In a notebook any function works until CUDA
    is in use. Each rank gets an equal share of the cores, unless OMP_NUM_THREADS is set; in a notebook with a world, 1.

    | device     as in `connect`
    | restarts   how many times all ranks are started again after one failed; `main` is then called from its start
    |            (`JobAttempt.current().restarts` counts the restarts). Ignored under torchrun
    | comm       as in `connect`

    Raises the first exception of `main` on any rank, with a note of the rank and its traceback. Raises RankLostError
    when a rank ended without an exception, and KeyboardInterrupt on Ctrl-C, after all ranks have ended. Raises
    ValueError for an incomplete environment or an impossible argument, RuntimeError for a notebook's function that
    cannot be forked, and NoSemaphoresError without room in /dev/shm."""
    if launched_rank():
        world = connect(device=device, comm=comm)
        if world.size != size:
            raise ValueError(f"run({size}, …) in a job of {world.size} ranks; start torchrun with {size} processes")
        try:
            result = main(world, *args)
        except SystemExit as left:
            if left.code:
                skip_close_at_exit()
            raise
        return world.exchange(result)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"cannot run on {size!r} ranks; pass a whole number above 0")
    stall_seconds_from_environment()
    method = _start_method(main)
    ended: BaseException | signal.Signals
    try:
        with (
            _as_launcher(size, method=method),
            comm_setting(comm),
            tempfile.TemporaryDirectory(prefix="meshwise-job-", ignore_cleanup_errors=True) as name,
        ):
            folder = Path(name)
            passed = (folder, LauncherEnvironment(), main, tuple(args), device)
            statuses = launch(rank_main, args=passed, size=size, restarts=restarts, method=method, folder=folder)
            outcomes = last_start(folder)
            if not statuses:
                return results(outcomes, size=size)
            ended = first_error(outcomes, size=size, statuses=statuses)
    except SignalException as received:
        ended = received.sigval
    if isinstance(ended, BaseException):
        raise ended
    _raise_again(ended)
    raise SystemExit(128 + ended)


def torchrun_line(size: int, argv: Sequence[str], *, restarts: int = 0) -> str:
    """Return the torchrun command that starts `size` ranks on this machine, quoted for the shell. argv: the script (or
    `-m` and the module), followed by its arguments. restarts: as in `run`."""
    again = [f"--max-restarts={restarts}"] if restarts else []
    return shlex.join(["torchrun", "--standalone", f"--nproc-per-node={size}", *again, *argv])


def _raise_again(received: signal.Signals) -> None:
    """Raise a signal, which torch's handler has received, again for this program's own handler; all ranks have ended.
    For Ctrl-C, print a plain message: the traceback would only show the wait for the ranks."""
    if signal.getsignal(received) == signal.SIG_DFL:
        util._exit_function()  # type: ignore[attr-defined] # not in the stubs; multiprocessing's own exit function
    sys.excepthook = functools.partial(_say_stopped, sys.excepthook)
    signal.raise_signal(received)


def _say_stopped(otherwise: Callable[..., object], kind: type[BaseException], error: BaseException, at: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("stopped by Ctrl-C; all ranks have ended\n")
    else:
        otherwise(kind, error, at)


def _start_method(main: Callable[..., Any]) -> str:
    """Return the start method of multiprocessing: `fork` if a notebook defines `main`, else as `start_context` chooses.
    Exits in a rank that imports a script with an unguarded `run`. Raises ValueError for a function that cannot be
    pickled, RuntimeError for a notebook's function where a fork is impossible."""
    script = sys.modules["__main__"]
    main = main.func if isinstance(main, functools.partial) else main
    if sys.modules.get("__mp_main__", script) is not script:
        # A forked process does not print why it exits.
        sys.stderr.write(
            'a rank reached run() while it imported the script: put the call under `if __name__ == "__main__":`\n'
        )
        sys.stderr.flush()
        raise SystemExit(1)
    if main.__module__ != "__main__" or Path(getattr(script, "__file__", "")).is_file():
        if "<" in main.__qualname__:
            raise ValueError(
                f"{main.__qualname__} cannot be pickled for another process: define it at the top of a module or script"
            )
        return start_context().get_start_method()
    if "fork" not in multiprocessing.get_all_start_methods() or cuda_in_use():
        why = "CUDA is already in use here" if cuda_in_use() else "this system cannot fork processes"
        raise RuntimeError(f"{main.__qualname__} is defined in a notebook and {why}: move it to a module and import it")
    return "fork"


def _received(handled: Sequence[signal.Signals], number: int, _frame: FrameType | None) -> NoReturn:
    """Raise SignalException as torch's launcher does, so that the ranks are ended; ignore `handled` from now on."""
    for other in handled:
        signal.signal(other, signal.SIG_IGN)
    received = signal.Signals(number)
    raise SignalException(f"got {received.name}", sigval=received)


@contextlib.contextmanager
def _as_launcher(size: int, *, method: str) -> Iterator[None]:
    """Set what torch's launcher needs (signal handlers, environment, logging), and restore it after the block."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in SIGNALS} if in_main_thread else {}
    kept_handlers = {number: handler for number, handler in found.items() if handler is not None}
    # Signals that this process ignores stay ignored: `nohup` and background jobs of a shell depend on this.
    handled = [number for number, handler in kept_handlers.items() if handler != signal.SIG_IGN]
    silenced = [
        logger
        for name, logger in logging.Logger.manager.loggerDict.items()
        if name.startswith(_LOUD) and isinstance(logger, logging.Logger) and not logger.disabled
    ]
    variables = {"TORCHELASTIC_SIGNALS_TO_HANDLE": ""}  # torch sets no handlers: `_received` is the handler
    if method == "fork" and has_world():
        # A fork has none of the threads with which torch computes in this process, and would wait for them for ever.
        variables["OMP_NUM_THREADS"] = "1"
    elif size > 1 and threads_from_environment() is None:
        variables["OMP_NUM_THREADS"] = str(max(1, cores() // size))
    for logger in silenced:
        logger.disabled = True
    try:
        for number in handled:
            signal.signal(number, functools.partial(_received, handled))
        with environment(variables):
            yield
    finally:
        for number, handler in kept_handlers.items():
            signal.signal(number, handler)
        for logger in silenced:
            logger.disabled = False


def cores() -> int:
    """Return the number of cores of the process's affinity, limited by the CPU quota of its cgroup; at least 1."""
    own = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with contextlib.suppress(OSError):
        share = _SHARE.read_text("utf-8").split()
        if len(share) == 2 and share[0] != "max":
            own = max(1, min(own, round(int(share[0]) / int(share[1]))))
    return own


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
        super().__init__(spec, logs, start_method=method)  # SIGTERM leaves the ranks 30 s, to save a checkpoint
        self._folder = folder
        self._ended: dict[int, float] = {}  # when the end of a process without an outcome was noticed, by PID
        self._failures: Mapping[int, ProcessFailure] = {}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._failures:
            self._print_restart_reason(worker_group.spec)
        self._ended.clear()
        self._pcontext = None  # frees the semaphores of the last start before the next start makes new ones
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        except OSError as error:
            if error.errno in _REFUSED and error.filename is None:  # multiprocessing names no file for semaphores
                raise NoSemaphoresError(error.errno, f"{os.strerror(error.errno)}: {_NO_ROOM}") from error
            raise
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        outcomes, now = last_start(self._folder), time.monotonic()
        silent = [one for one in worker_group.workers if not RankOutcome.exists(outcomes, rank=one.global_rank)]
        for one in silent:
            if has_ended(one.id):
                self._ended.setdefault(one.id, now)
        ages = {one: now - self._ended[one.id] for one in silent if one.id in self._ended}
        if 0 < len(ages) < len(silent) and min(ages.values()) < _WORDS_SECONDS:
            return RunResult(WorkerState.HEALTHY)
        certain = all(age > _CERTAIN_SECONDS and _is_reaped(one.id) for one, age in ages.items())
        left_nothing = {
            one.global_rank: ProcessFailure(one.local_rank, pid=one.id, exitcode=0, error_file="")
            for one in ages
            if certain  # so ranks that end one after the other are named together
        }
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY and left_nothing:
            result = RunResult(WorkerState.FAILED, failures=left_nothing)
        self._failures = result.failures
        return result

    def _print_restart_reason(self, spec: WorkerSpec) -> None:
        restart = spec.max_restarts - self._remaining_restarts
        statuses = {rank: failure.exitcode for rank, failure in self._failures.items()}
        previous = start_folder(self._folder, number=restart - 1)
        error = first_error(previous, size=spec.local_world_size, statuses=statuses)
        report_to_stderr(f"meshwise: restart {restart} of {spec.max_restarts}, because {type(error).__name__}: {error}")


def _is_reaped(process: int) -> bool:
    """Return whether a process has ended and its parent has taken its status, which torch then learns."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 0)
        return False
    return True

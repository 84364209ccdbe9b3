"""Fork the ranks of a machine from a server instead of starting each one.

A process that imports torch takes seconds to start. So the ranks are forked from a multiprocessing server that has
imported torch once and does nothing else. None of its threads holds a lock, and a restart is immediate. Where there is
a GPU every rank starts afresh, because a process that has asked for the GPUs cannot hand them on. On macOS too: system
libraries may run threads once they are imported.

    launcher ──asks── server ──forks── rank 0, rank 1, …        the parent of a rank is the server, not the launcher

A forked rank inherits the environment of the server, as it was when the server started. So the launcher sends its own
environment along (`LauncherEnvironment`). A rank asks multiprocessing whether its launcher lives (`LauncherProcess`).

The server itself starts afresh. A command that has only imported modules may be copied instead
(`fork_server_from_here`), which saves the seconds.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import context, forkserver, process, reduction, resource_tracker, util
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, NoReturn

from meshwise.comm.api.streams import gpu_count

_PRELOADED = ("torch._dynamo", "meshwise.comm.launch.launch")  # an optimizer imports torch._dynamo
_OF_THE_TERMINAL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_STREAMS = (1, 2)
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals other than Ctrl-C that end a process."""
_SET_BY_TORCH = ("RANK", "WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")


def start_context() -> ForkServerContext | SpawnContext:
    """Return the multiprocessing context that starts ranks here, with its server running until this process ends.

    The server ignores Ctrl-C and the end of the terminal: an interrupted import would print a useless traceback.
    """
    forks = sys.platform != "darwin" and "forkserver" in multiprocessing.get_all_start_methods()
    if gpu_count() or not forks:
        return multiprocessing.get_context("spawn")
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(list(_PRELOADED))
    with _terminal_signals_blocked():
        resource_tracker.ensure_running()  # which lets Ctrl-C through again
    with _terminal_signals_blocked():
        forkserver.ensure_running()
    atexit.unregister(_end_server)
    atexit.register(_end_server)
    return forking


def fork_server_from_here() -> None:
    """Make the server of `start_context` a copy of this process, whose modules need not be imported again.

    This process must only have imported modules so far: each rank inherits the rest of its state.
    """
    with _terminal_signals_blocked():
        resource_tracker.ensure_running()
    ordinary = util.spawnv_passfds

    def copy(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        del path
        pid = _fork()
        if not pid:
            util.spawnv_passfds = ordinary
            _serve(args[-1], passfds)
        return pid

    util.spawnv_passfds = copy  # by which multiprocessing starts the server; were it by another, it would start afresh
    try:
        start_context()
    finally:
        util.spawnv_passfds = ordinary


@contextlib.contextmanager
def _terminal_signals_blocked() -> Iterator[None]:
    """Block the signals of the terminal for the processes started in the block."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_TERMINAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork() -> int:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # none of one that is closed
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of OpenBLAS, which minds forks
        return os.fork()


def _serve(line: str, kept: Sequence[int]) -> NoReturn:
    """Serve forks in a copy of the launcher, without its open files and locks."""
    try:
        for number in {int(name) for name in os.listdir("/dev/fd")} - {0, *_STREAMS, *kept}:  # noqa: PTH208 - numbers
            with contextlib.suppress(OSError):  # one of them was what listed them
                os.close(number)
        vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)
        exec(line, {})  # noqa: S102 - multiprocessing's own line, which ends when the launcher has ended
    except Exception:  # noqa: BLE001 - printed as by any process
        traceback.print_exc()
    finally:
        os._exit(1)


def _end_server() -> None:
    """End the server now: without this it ends with this process too, but only after all its imports."""
    pid = vars(forkserver._forkserver).get("_forkserver_pid")
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


class LauncherEnvironment:
    """Environment, folder, output and start method of the launcher, for a rank that it starts."""

    def __init__(self) -> None:
        self._method = multiprocessing.get_start_method(allow_none=True)
        self._environment = {name: value for name, value in os.environ.items() if not name.endswith(_SET_BY_TORCH)}
        self._folder = Path.cwd()
        self._streams: Sequence[Any] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle for a process being started; file descriptors can travel then."""
        popen = context.get_spawning_popen()
        forked = popen is not None and popen.method == "forkserver"
        return {**vars(self), "_streams": [reduction.DupFd(number) for number in _STREAMS] if forked else ()}

    def enter(self) -> None:
        """Take over the launcher's environment where this process has not inherited it."""
        # Or its workers would be started as it was, later than by a fork, and a server would keep them when it is gone.
        multiprocessing.set_start_method(self._method, force=True)
        util.register_after_fork(LauncherEnvironment, _end_workers_with_job)
        if not self._streams:
            return
        for number, stream in zip(_STREAMS, self._streams, strict=True):
            given = stream.detach()
            os.dup2(given, number)
            os.close(given)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_TERMINAL)
        os.environ.update(self._environment)
        os.chdir(self._folder)
        atexit._clear()  # what the server has to do at its end
        gc.freeze()  # what the server imported stays: a collection would walk all of it, and copy its pages
        # A forked process does not come to Python's own end.
        util.Finalize(None, atexit._run_exitfuncs, exitpriority=-1)


def _end_workers_with_job(_: object) -> None:
    """Let a process that multiprocessing has forked from a rank end with the job."""
    util.Finalize(None, _end_if_job_is_over, exitpriority=100)


def _end_if_job_is_over() -> None:
    """End silently when the job is over: a data worker notices that seconds later, and would report each file that it
    cannot remove.
    """
    folder = vars(process.current_process())["_config"].get("tempdir")
    if folder is not None and not Path(folder).exists():
        os._exit(0)

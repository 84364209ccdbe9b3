"""Fork the ranks of a machine from a server process that has imported torch, because importing torch takes seconds.

The server is multiprocessing's fork server. It imports torch once, so restarted ranks start quickly. It runs nothing
else, so none of its threads holds a lock at a fork. On a machine with a GPU every rank is a new process (spawn),
because a fork of a process that has counted the GPUs cannot use them. macOS uses spawn too: its libraries run threads.

    launcher ──asks── server ──forks── rank 0, rank 1, …        the parent of a rank is the server, not the launcher

A forked rank inherits the environment that the server had at its start. So the launcher sends its present environment
to each rank (`LauncherEnvironment`). The launcher is not the parent of a rank, so `launcher_info.LauncherProcess` asks
multiprocessing whether the launcher runs.

By default (`start_context`) the server is a new process. `fork_server_from_here` forks the launcher instead."""

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
END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals besides SIGINT (Ctrl-C) on which a launcher and its ranks end."""
_SET_BY_TORCH = ("RANK", "WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")


def start_context() -> ForkServerContext | SpawnContext:
    """Return the multiprocessing context for ranks: spawn on macOS and on machines with a GPU, else forkserver. For
    forkserver, also start the fork server, which runs until this process ends. The server blocks the signals of the
    terminal, such as Ctrl-C: otherwise an interrupted import would print a traceback."""
    forks = sys.platform != "darwin" and "forkserver" in multiprocessing.get_all_start_methods()
    if gpu_count() or not forks:
        return multiprocessing.get_context("spawn")
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(list(_PRELOADED))
    with _terminal_signals_blocked():
        resource_tracker.ensure_running()  # this call unblocks Ctrl-C, so the next block blocks it again
    with _terminal_signals_blocked():
        forkserver.ensure_running()
    atexit.unregister(_end_server)
    atexit.register(_end_server)
    return forking


def fork_server_from_here() -> None:
    """Start the server of `start_context` as a fork of this process, which has imported the modules already. Call this
    function before this process does anything but import modules: each rank inherits all of its state."""
    with _terminal_signals_blocked():
        resource_tracker.ensure_running()
    ordinary = util.spawnv_passfds

    def copy(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        del path
        for stream in filter(None, (sys.stdout, sys.stderr)):  # a closed stream is None
            stream.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about OpenBLAS' threads, which it handles in forks
            pid = os.fork()
        if not pid:
            util.spawnv_passfds = ordinary
            _serve(args[-1], passfds)
        return pid

    util.spawnv_passfds = copy  # multiprocessing starts the server with this; otherwise the server is no fork
    try:
        start_context()
    finally:
        util.spawnv_passfds = ordinary


@contextlib.contextmanager
def _terminal_signals_blocked() -> Iterator[None]:
    """Block the signals of the terminal while the context is active; processes started meanwhile inherit the mask."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_TERMINAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(line: str, kept: Sequence[int]) -> NoReturn:
    """Run the fork server in a fork of the launcher, after closing the launcher's open files."""
    try:
        for number in {int(name) for name in os.listdir("/dev/fd")} - {0, *_STREAMS, *kept}:  # noqa: PTH208 - numbers
            with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed already
                os.close(number)
        vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)
        exec(line, {})  # noqa: S102 - multiprocessing's own code, which returns when the launcher has ended
    except Exception:  # noqa: BLE001 - printed as by any process
        traceback.print_exc()
    finally:
        os._exit(1)


def _end_server() -> None:
    """End the server at once. Without this, it would end after this process, but only when its imports are done."""
    pid = vars(forkserver._forkserver).get("_forkserver_pid")
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


class LauncherEnvironment:
    """Environment, working directory, output files and start method of the launcher, to be sent to a rank."""

    def __init__(self) -> None:
        self._method = multiprocessing.get_start_method(allow_none=True)
        self._environment = {name: value for name, value in os.environ.items() if not name.endswith(_SET_BY_TORCH)}
        self._folder = Path.cwd()
        self._streams: Sequence[Any] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle; it has file descriptors if the fork server starts the process."""
        popen = context.get_spawning_popen()
        forked = popen is not None and popen.method == "forkserver"
        return {**vars(self), "_streams": [reduction.DupFd(number) for number in _STREAMS] if forked else ()}

    def enter(self) -> None:
        """Apply to this process, a rank, the launcher's settings that the rank has not inherited."""
        # The launcher's start method: with `forkserver`, data workers would come from a server and outlive the rank.
        multiprocessing.set_start_method(self._method, force=True)
        util.register_after_fork(
            LauncherEnvironment, lambda _: util.Finalize(None, _end_if_job_is_over, exitpriority=100)
        )
        if not self._streams:
            return
        for number, stream in zip(_STREAMS, self._streams, strict=True):
            given = stream.detach()
            os.dup2(given, number)
            os.close(given)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_TERMINAL)
        os.environ.update(self._environment)
        os.chdir(self._folder)
        atexit._clear()  # remove the functions that the server registered
        gc.freeze()  # garbage collections skip the server's objects: to visit them would copy their memory pages
        # A forked process ends without Python's own exit, so its exit functions are called by multiprocessing.
        util.Finalize(None, atexit._run_exitfuncs, exitpriority=-1)


def _end_if_job_is_over() -> None:
    """End this process without output if the job is over. A data worker would report each file it cannot remove."""
    folder = vars(process.current_process())["_config"].get("tempdir")
    if folder is not None and not Path(folder).exists():
        os._exit(0)

"""Fork the ranks of a machine from a server instead of starting each one.

A process that imports torch takes seconds to start. So the ranks are forked from a multiprocessing server that has
imported torch once and does nothing else. None of its threads holds a lock, and a restart is immediate. Where there is
a GPU every rank starts afresh, because a process that has asked for the GPUs cannot hand them on. On macOS too: system
libraries may run threads once they are imported.

    launcher ──asks── server ──forks── rank 0, rank 1, …        the parent of a rank is the server, not the launcher

A forked rank inherits the environment of the server, as it was when the server started. So the launcher sends its own
environment along (`LauncherEnvironment`). A rank asks multiprocessing whether its launcher lives (`LauncherProcess`).

The server itself starts afresh. A command that has only imported modules may be copied instead (`copied`), which saves
the seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing import context, forkserver, process, reduction, resource_tracker, util
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from meshwise.comm.api.streams import gpu_count
from meshwise.comm.launch.job_folder import new_folder, remove_folder, remove_folders
from meshwise.comm.launch.job_semaphores import named_as_ever

_PRELOADED = (
    "torch._dynamo",
    "meshwise.comm.launch.launch",
    "meshwise.comm.launch.orphan_guard",
)  # an optimizer imports torch._dynamo
_OF_THE_TERMINAL = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_STREAMS = (1, 2)
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a process, beside Ctrl-C."""

_LONGEST = 60
_TOLD_BY_TORCH = ("RANK", "WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")


def open_streams() -> None:
    """Open the null device where a standard stream of this process is closed. What is opened next would have its
    number, and the processes started here would take it for that stream.
    """
    for number in (0, *_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # noqa: FBT003 - as Python has it


def starting() -> ForkServerContext | SpawnContext:
    """Return the multiprocessing context that starts ranks here. Their server runs then, until this process ends. It is
    deaf to Ctrl-C and the end of the terminal: an import that is interrupted would only tell where it was.
    """
    open_streams()
    forks = sys.platform != "darwin" and "forkserver" in multiprocessing.get_all_start_methods()
    if gpu_count() or not forks:
        return multiprocessing.get_context("spawn")
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(list(_PRELOADED))
    temporary()
    _forget_in_copies()
    heard = _start_tracker()
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_TERMINAL)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    atexit.unregister(_end_server)
    atexit.register(_end_server)
    return forking


@functools.cache
def _forget_in_copies() -> None:
    """Let a copy of this process start ranks of its own by a server of its own, and not end this one's."""
    os.register_at_fork(after_in_child=_forget_server)


def _forget_server() -> None:
    server = vars(forkserver._forkserver)
    if (alive := server["_forkserver_alive_fd"]) is not None:
        os.close(alive)
    server.update(_lock=threading.Lock(), _forkserver_pid=None, _forkserver_alive_fd=None, _forkserver_address=None)
    named_as_ever()
    if temporary.cache_info().currsize:  # that goes with the process which has made it
        temporary.cache_clear()
        vars(process.current_process())["_config"].pop("tempdir", None)


@functools.cache
def temporary() -> util.Finalize:
    """Have multiprocessing keep its files, where its server is met, in a folder that the next job removes if this
    process is killed. Returns what removes it now.
    """
    folder = new_folder(_short(tempfile.gettempdir()))
    process.current_process()._config.setdefault("tempdir", str(folder))  # type: ignore[attr-defined] # as it does itself
    return util.Finalize(None, remove_folder, args=(folder,), exitpriority=-100)


@contextlib.contextmanager
def tidying() -> Iterator[None]:
    """Let signals that end this process remove first the folders it has made; in copies of it, they only end them."""
    early: list[int] = []  # to block them would not do: a signal goes to any thread, and libraries have some by now
    made = False

    def end(number: int, _frame: FrameType | None) -> None:
        if not made:
            early.append(number)
            return
        for other in deadly:  # a second one is to find the folder removed, too
            signal.signal(other, signal.SIG_IGN)
        remove_folders()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    deadly = [number for number in ENDING if signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in deadly:
            signal.signal(number, end)
        temporary()
        made = True
        for signalled in early:
            end(signalled, None)
        yield
    finally:
        for number in deadly:
            signal.signal(number, signal.SIG_DFL)
        if early:  # and nothing could be made
            signal.raise_signal(early[0])


def _short(folder: str) -> Path:
    """Return a folder for sockets, whose paths may have a hundred bytes: this one, or where a system has temporary
    files.
    """
    for name in (folder, "/tmp", "/var/tmp"):  # noqa: S108 - of a folder of our own in it
        if len(os.fsencode(name)) <= _LONGEST and os.access(name, os.W_OK):
            return Path(name)
    return Path(folder)


def _start_tracker() -> set[int]:
    """Return the resource tracker; it ignores signals too, or its end would be reported. Returns the signals that were
    blocked before; it lets Ctrl-C through again.
    """
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_TERMINAL)
    try:
        resource_tracker.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    return heard


def copied() -> None:
    """Make the server that `starting` finds a copy of this process, whose modules need not be imported again. This
    process has to have done nothing else yet: what else it had, every rank would have.
    """
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    try:
        # Afresh: it needs nothing of torch. Where a job is killed it removes what there is of it, which is no leak.
        _start_tracker()
    finally:
        sys.warnoptions.pop()
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
        starting()
    finally:
        util.spawnv_passfds = ordinary


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
    except Exception:  # noqa: BLE001 - as a process of its own would tell it
        traceback.print_exc()
    finally:
        os._exit(1)


def _end_server() -> None:
    """Without this it ends with this process too, but only after all its imports. Its folder goes with it, whether or
    not another Ctrl-C comes.
    """
    pid = vars(forkserver._forkserver).get("_forkserver_pid")
    in_main_thread = threading.current_thread() is threading.main_thread()
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
    if temporary.cache_info().currsize:
        temporary()()
    if heard is not None:
        signal.signal(signal.SIGINT, heard)


def end_quietly() -> None:
    """Let another Ctrl-C end this process without a word once it is about to end, and has removed what it made."""
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    atexit.unregister(_end_server)
    atexit.register(_end_server)  # what was registered last comes first


class LauncherEnvironment:
    """The environment, the folder and the output of the process that makes it, and how it would start others, for a
    process that it starts.
    """

    def __init__(self) -> None:
        self._method = multiprocessing.get_start_method(allow_none=True)
        self._environment = {name: value for name, value in os.environ.items() if not name.endswith(_TOLD_BY_TORCH)}
        self._folder = Path.cwd()
        self._streams: Sequence[Any] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle for a process being started; file descriptors can travel then."""
        popen = context.get_spawning_popen()
        forked = popen is not None and popen.method == "forkserver"
        return {**vars(self), "_streams": [reduction.DupFd(number) for number in _STREAMS] if forked else ()}

    def enter(self) -> None:
        """Apply the environment in the process that received it, where the process does not have it by inheritance."""
        # Or its workers would be started as it was, later than by a fork, and a server would keep them when it is gone.
        multiprocessing.set_start_method(self._method, force=True)
        util.register_after_fork(LauncherEnvironment, _watch_for_the_end)
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


def _watch_for_the_end(_: object) -> None:
    """In a process that multiprocessing has forked from a rank."""
    util.Finalize(None, _end_with_the_job, exitpriority=100)


def _end_with_the_job() -> None:
    """End silently when the job is over: a data worker notices that seconds later, and would report each file that it
    cannot remove.
    """
    folder = vars(process.current_process())["_config"].get("tempdir")
    if folder is not None and not Path(folder).exists():
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(0)

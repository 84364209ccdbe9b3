"""Start the ranks of a job on this machine, run a function on each, and return the results: `run`.

`run` uses the elastic launcher of torchrun. In a process that torchrun has started, `run` only connects this rank. So
one script works with `python` and with torchrun.

    run ── elastic_agent ──── rank_process ────────────── connect ──────── main(world, …)
     │     torch's launcher   one rank, start to end      its world
     └─ rank_outcome: the results of `main`, or the first error (not the errors that it caused in other ranks)"""

import contextlib
import functools
import logging
import multiprocessing
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import util
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeAlias

from torch.distributed.elastic.multiprocessing import SignalException

from meshwise.comm.api.launch_environment import launched_rank
from meshwise.comm.api.streams import cuda_in_use
from meshwise.comm.health.watchdog import stall_seconds_from_environment
from meshwise.comm.launch.connect import comm_setting, connect, has_world, leave_undone
from meshwise.comm.launch.cores import cores
from meshwise.comm.launch.elastic_agent import launch
from meshwise.comm.launch.fork_server import LauncherEnvironment, start_context
from meshwise.comm.launch.rank_outcome import first_error, job_folder, last_start, results
from meshwise.comm.launch.rank_process import SIGNALS, asked_threads, rank_main
from meshwise.comm.network.process_world import Comm

ExceptHook: TypeAlias = Callable[[type[BaseException], BaseException, Any], object]
"""Function like `sys.excepthook`: (type, exception, traceback)."""

_HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_LOUD = ("torch.distributed.elastic", "torch.multiprocessing")


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

    Starts `size` processes on this machine, and ends them again. Under torchrun, which runs the script on every rank,
    it only connects this process, and returns the results of all ranks. `main`, `args` and results are pickled, so
    `main` is a function at the top of a module or script; call `run` under `if __name__ == "__main__":`. In a notebook
    any function works. Each rank gets an equal share of the cores as threads, unless OMP_NUM_THREADS is set.

    | device     as in `connect`
    | restarts   how many times all ranks are started again after one failed; `main` is then called from its start
    |            (`JobAttempt.current().restarts` counts the restarts). Ignored under torchrun
    | comm       as in `connect`

    Raises the first exception of `main` on any rank, with a note of the rank and its traceback. Raises RankLostError
    when a rank ended without an exception, and KeyboardInterrupt on Ctrl-C, after all ranks have ended. Raises
    ValueError for an incomplete environment or an impossible argument, NoSemaphoresError without room in /dev/shm."""
    if launched_rank():
        world = connect(device=device, comm=comm)
        if world.size != size:
            raise ValueError(f"run({size}, …) in a job of {world.size} ranks; start torchrun with {size} processes")
        try:
            result = main(world, *args)
        except SystemExit as left:
            if left.code:
                leave_undone()
            raise
        return world.exchange(result)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"cannot run on {size!r} ranks")
    stall_seconds_from_environment()
    method = _start_method(main)
    ended: BaseException | signal.Signals
    try:
        with _as_launcher(size, method=method), comm_setting(comm), job_folder() as folder:
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
    # torch's handler has received the signal. Now that all ranks have ended, raise it again for this program's own
    # handler. For Ctrl-C, print a plain message: the traceback would only show the wait for the ranks.
    if signal.getsignal(ended) == signal.SIG_DFL:
        util._exit_function()  # type: ignore[attr-defined] # not in the stubs; multiprocessing's own exit function
    sys.excepthook = functools.partial(_say_stopped, sys.excepthook)
    signal.raise_signal(ended)
    raise SystemExit(128 + ended)


def torchrun_line(size: int, argv: Sequence[str], *, restarts: int = 0) -> str:
    """Return the torchrun command that starts `size` ranks on this machine, quoted for the shell. argv: the script (or
    `-m` and the module), followed by its arguments. restarts: as in `run`."""
    again = [f"--max-restarts={restarts}"] if restarts else []
    return shlex.join(["torchrun", "--standalone", f"--nproc-per-node={size}", *again, *argv])


def _say_stopped(otherwise: ExceptHook, kind: type[BaseException], error: BaseException, at: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("stopped by Ctrl-C; all ranks have ended\n")
    else:
        otherwise(kind, error, at)


def _start_method(main: Callable[..., Any]) -> str:
    """Return the start method of multiprocessing: `fork` if a notebook defines `main`, else the one of `start_context`.
    Exits in a rank that imports a script with an unguarded `run`. Raises ValueError for a function that cannot be
    pickled, RuntimeError for a notebook's function where a fork is impossible."""
    script = sys.modules["__main__"]
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
    kept_environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", _HANDLED)}
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
    if method == "fork" and has_world():
        # A fork has none of the threads with which torch computes in this process, and would wait for them for ever.
        os.environ["OMP_NUM_THREADS"] = "1"
    elif size > 1 and asked_threads() is None:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // size))
    os.environ[_HANDLED] = ""  # torch sets no handlers: `_received` is the handler
    for logger in silenced:
        logger.disabled = True
    try:
        for number in handled:
            signal.signal(number, functools.partial(_received, handled))
        yield
    finally:
        for number, handler in kept_handlers.items():
            signal.signal(number, handler)
        for logger in silenced:
            logger.disabled = False
        for name, value in kept_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

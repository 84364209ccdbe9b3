"""Starting ranks, and joining those that were started.

`connect` is for a program that torchrun (or srun torchrun) has started. `run` is for a script or a notebook: it starts
the ranks of one machine itself, through the elastic launcher that torchrun uses, and under torchrun it only connects.
So the same file works both ways.

What torch's launcher leaves open is closed here. A rank that blocks in a collective cannot answer Ctrl-C, nor the
signal that its launcher is gone: it dies of both at once. A rank that worked cannot fail at interpreter exit, where
threads of torch may abort the process. And the error raised is the one that came first, with its traceback, not one of
those that it caused in the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, cast, get_args

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwise.comm.attempt import Attempt
from meshwise.comm.forked import Launcher, Surroundings, starting
from meshwise.comm.journal import RanksDisagree
from meshwise.comm.loopback import BACKEND, LOOPBACK, make_known
from meshwise.comm.lost import RankLostError
from meshwise.comm.outcome import Outcome, first_error, results, status_of
from meshwise.comm.torch_world import COMM_VARIABLE, Comm, default_device, meeting_place, torch_world
from meshwise.comm.watch import Tell, Watch, tell_stderr
from meshwise.comm.world import World

ExceptHook: TypeAlias = Callable[[type[BaseException], BaseException, Any], object]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LOUD = ("torch.distributed.elastic", "torch.multiprocessing")
_SHUTDOWN_SECONDS = 5
_POLL_SECONDS = 0.1
_LEAVING_TIME = timedelta(seconds=5)
# Longer than the launcher takes, on a machine with too much to do as well, to notice the rank that ended first: it ends
# the others then.
_CONSEQUENCE_SECONDS = 30 * _POLL_SECONDS


def connect(
    *, device: torch.device | str | None = None, stall_seconds: float | None = None, comm: Comm | None = None
) -> World:
    """The world of this process, over the mesh `rank=N` of all its ranks. Every rank of the job calls it.

    `device`: where this rank's tensors are; by default the GPU with its local number, or the CPU. The same device gives
    the same world again. It is watched (see `watch`, also for `stall_seconds`) and closed at exit at the latest; once
    closed it stays closed. `comm`: how CPU ranks of one host are joined, `local` (shared memory), `gloo`, or `auto`; by
    default what the environment variable MESHWISE_COMM says, else `auto`.

    Raises ValueError when some ranks are on CPU and others on CUDA, or when `local` is impossible, and torch's
    DistError when ranks stay away for ten minutes.
    """
    with _joined_by(comm):
        return _connect(device, stall_seconds, tell_stderr)


def _connect(device: torch.device | str | None, stall_seconds: float | None, tell: Tell) -> World:
    wanted = default_device() if device is None else torch.device(device)
    if wanted.type == "cuda":
        wanted = torch.device("cuda", default_device().index if wanted.index is None else wanted.index)
        torch.cuda.set_device(wanted)
    worlds = _worlds()
    if wanted not in worlds:
        worlds[wanted] = _join(wanted, stall_seconds, tell)
    return worlds[wanted]


@functools.cache
def _worlds() -> dict[torch.device, World]:
    """The worlds this process has joined. A process is one rank, whoever in it asks."""
    return {}


def _join(device: torch.device, stall_seconds: float | None, tell: Tell) -> World:
    store = meeting_place()
    world = torch_world(device, store=store, comm=_comm())
    if store is not None:
        launcher = Launcher() if "TORCHELASTIC_RUN_ID" in os.environ else None
        own = c10d.PrefixStore(device.type, store)
        watch = Watch(world, store=own, stall_seconds=stall_seconds, tell=tell, launcher=launcher)
        watch.start()
        atexit.register(_leave_store, own, rank=world.rank, size=world.size)
        atexit.register(watch.stop)
    # Runs before the watch stops: what is still under way is waited for, and watched.
    atexit.register(_close, world)
    os.register_at_fork(after_in_child=_end_as_a_copy)
    return world


def _end_as_a_copy() -> None:
    """In a copy of the process: how it ends says nothing of the rank."""
    for last in (_close, _leave_store):
        atexit.unregister(last)


def _close(world: World) -> None:
    """Close at exit. That another rank is lost has been said by then, or it does not matter any more."""
    with contextlib.suppress(RankLostError):
        world.close()


def _comm() -> Comm:
    """What the environment says. Raises ValueError when that is nothing we know."""
    named = os.environ.get(COMM_VARIABLE, "auto")
    for comm in get_args(Comm):
        if named == comm:
            return cast(Comm, comm)
    raise ValueError(f"{COMM_VARIABLE}={named}: ranks of one host are joined by {', '.join(get_args(Comm))}")


@contextlib.contextmanager
def _joined_by(comm: Comm | None) -> Iterator[None]:
    """Let the environment, which the processes started here inherit, say how ranks are joined."""
    kept = os.environ.get(COMM_VARIABLE)
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
    """Without a launcher's store rank 0's process holds it: it goes last, or the others' last words fail loudly."""
    with contextlib.suppress(RuntimeError):
        if store.add("left", 1) == size:
            store.set("all left", "")
        if rank == 0:
            store.wait(["all left"], _LEAVING_TIME)


def run(
    size: int,
    main: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    device: str | None = None,
    restarts: int = 0,
    comm: Comm | None = None,
) -> list[Any]:
    """Call `main(world, *args)` on `size` ranks and return what it returned on each, by rank.

    Starts `size` processes on this machine and ends them again; under torchrun, whose ranks already are processes, it
    connects this one instead. `main`, `args` and the results travel by pickle: `main` is a function at the top of a
    module or script, called under `if __name__ == "__main__":`; in a notebook any function will do. A rank gets
    its part of the machine's cores as threads unless OMP_NUM_THREADS says otherwise.

    restarts: how many times all ranks are ended and started again when one fails, and `main` called anew; what it
    should not do twice it has to keep somewhere (see `Attempt` for which start it is). comm: as in `connect`.

    Raises what `main` raised first on any rank, with a note of the rank and its traceback; RankLostError when a
    rank ended without an exception; KeyboardInterrupt on Ctrl-C, after all ranks have ended.
    """
    if "RANK" in os.environ:
        world = connect(device=device, comm=comm)
        if world.size != size:
            raise ValueError(f"run({size}, …) in a job of {world.size} ranks; start torchrun with {size} processes")
        return world.exchange(main(world, *args))
    if size < 1:
        raise ValueError(f"cannot run on {size} ranks")
    method = _start_method(main)
    with tempfile.TemporaryDirectory(prefix="meshwise-") as name, _as_launcher(size), _joined_by(comm):
        folder = Path(name)
        config = _launch_config(size, folder, method=method, restarts=restarts)
        ended: BaseException | signal.Signals
        try:
            elastic_launch(config, _rank_main)(folder, Surroundings(), main, tuple(args), device)
            return results(_last_start(folder), size=size)
        except ChildFailedError as failed:
            statuses = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            ended = first_error(_last_start(folder), size=size, statuses=statuses)
        except SignalException as received:
            ended = received.sigval
    if isinstance(ended, BaseException):
        raise ended
    # The signal came to torch's handler. Now that all ranks have ended, it does what it does without one; of Ctrl-C
    # that nobody catches, a traceback into the wait for the ranks would tell nothing.
    sys.excepthook = functools.partial(_say_stopped, sys.excepthook)
    signal.raise_signal(ended)
    raise SystemExit(128 + ended)


def torchrun_line(size: int, argv: Sequence[str], *, restarts: int = 0) -> str:
    """The command that starts the same ranks with torchrun: `argv` is a script or `-m module`, and its arguments."""
    again = [f"--max-restarts={restarts}"] if restarts else []
    return shlex.join(["torchrun", "--standalone", f"--nproc-per-node={size}", *again, *argv])


def _say_stopped(otherwise: ExceptHook, kind: type[BaseException], error: BaseException, at: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("stopped by Ctrl-C; all ranks have ended\n")
    else:
        otherwise(kind, error, at)


# ---- in the process that starts the ranks --------------------------------------------------------------------------


def _launch_config(size: int, folder: Path, *, method: str, restarts: int) -> LaunchConfig:
    """What torch's launcher is told: one host, which listens to itself alone."""
    make_known()
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=uuid.uuid4().hex,
        rdzv_backend=BACKEND,
        rdzv_endpoint=LOOPBACK,
        local_addr=LOOPBACK,
        max_restarts=restarts,
        monitor_interval=_POLL_SECONDS,
        start_method=method,
        shutdown_timeout=_SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )


def _start_method(main: Callable[..., Any]) -> str:
    """How torch's launcher should start the processes: as copies of this one when `main` only lives in a notebook."""
    script = sys.modules["__main__"]
    if sys.modules.get("__mp_main__", script) is not script:
        # A forked process does not print why it exits.
        sys.stderr.write(
            'a rank came to run() while it imported the script: put the call under `if __name__ == "__main__":`\n'
        )
        sys.stderr.flush()
        raise SystemExit(1)
    if main.__module__ != "__main__" or Path(getattr(script, "__file__", "")).is_file():
        if "<" in main.__qualname__:
            raise ValueError(
                f"{main.__qualname__} cannot travel to another process: define it at the top of a module or script"
            )
        return starting().get_start_method()
    if "fork" not in multiprocessing.get_all_start_methods() or torch.cuda.is_initialized():
        why = "CUDA is already in use here" if torch.cuda.is_initialized() else "this system cannot copy processes"
        raise RuntimeError(f"{main.__qualname__} is defined in a notebook and {why}: move it to a module and import it")
    return "fork"


@contextlib.contextmanager
def _as_launcher(size: int) -> Iterator[None]:
    """Be what torch's launcher expects of a process, and what this one was again afterwards."""
    kept_environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    in_main_thread = threading.current_thread() is threading.main_thread()
    kept_handlers = {number: signal.getsignal(number) for number in _SIGNALS} if in_main_thread else {}
    silenced = [
        logger
        for name, logger in logging.Logger.manager.loggerDict.items()
        if name.startswith(_LOUD) and isinstance(logger, logging.Logger) and not logger.disabled
    ]
    if size > 1 and asked_threads() is None:
        os.environ["OMP_NUM_THREADS"] = str(max(1, _cores() // size))
    for logger in silenced:
        logger.disabled = True
    try:
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


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def asked_threads() -> int | None:
    """The threads of a rank by OMP_NUM_THREADS, which may be a list with a number for each level; OpenMP passes over
    what is none, with a word.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if re.fullmatch("0*[1-9][0-9]{0,5}", first) else None


def _start_folder(folder: Path, number: int) -> Path:
    """Where the ranks of one start leave their outcomes."""
    return folder / f"start-{number}"


def _last_start(folder: Path) -> Path:
    return max(folder.glob("start-*"), key=lambda path: int(path.name.rpartition("-")[2]), default=folder)


# ---- in a rank -----------------------------------------------------------------------------------------------------


def _rank_main(
    folder: Path, surroundings: Surroundings, main: Callable[..., Any], args: tuple[Any, ...], device: str | None
) -> None:
    """One rank from start to end. What it leaves is an `Outcome`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    surroundings.enter()
    if Launcher().is_gone():
        _leave(1)
    atexit.register(_leave, 0)
    rank = int(os.environ["RANK"])
    attempt = Attempt.current()
    assert attempt is not None, "torch's launcher names the start"
    starts, folder = folder, _start_folder(folder, attempt.number)

    def tell(report: str, *, final: bool) -> None:
        if final:
            Outcome(error=RanksDisagree(report), seconds=time.time()).save(folder, rank=rank)
        else:
            tell_stderr(report, final=final)

    own = os.getpid()
    try:
        folder.mkdir(exist_ok=True)
        if rank == 0 and attempt.number:
            _tell_restart(starts, attempt)
        torch.set_num_threads(asked_threads() or torch.get_num_threads())
        world = _connect(device, None, tell)
        outcome = _outcome(functools.partial(main, world, *args))
        if os.getpid() != own:  # `main` has copied the process: how a copy ends says nothing of the rank
            _leave(0)
        world.close()
        outcome.save(folder, rank=rank)
    except BaseException as error:  # noqa: BLE001 - whatever ended this rank is for the launcher to tell
        if os.getpid() != own:
            _leave(status_of(error))
        try:
            outcome = Outcome.of(error)
            try:
                outcome.save(folder, rank=rank)
            except OSError:  # a full disk, say: then it is told here, or nowhere
                traceback.print_exc()
            if outcome.is_consequence:
                time.sleep(_CONSEQUENCE_SECONDS)
        finally:  # an exception that left here would end the process with status 0, and the launcher wait for a result
            _leave(1)


def _outcome(main: Callable[[], Any]) -> Outcome:
    """What it returned, or that it left by `sys.exit` as one does at a good end."""
    own = os.getpid()
    try:
        return Outcome(main())
    except SystemExit as left:
        outcome = Outcome.of(left)
        if outcome.left_well and os.getpid() == own:
            return outcome
        raise


def _tell_restart(folder: Path, attempt: Attempt) -> None:
    """Say why the ranks are started again, from what those of the last start have left."""
    previous = _start_folder(folder, attempt.number - 1)
    outcomes = [
        Outcome.load(previous, rank=int(path.name)) for path in previous.glob("[0-9]*") if path.name.isdecimal()
    ]
    raised = [outcome for outcome in outcomes if outcome is not None and outcome.error is not None]
    first = min(raised, key=lambda outcome: (outcome.is_consequence, outcome.seconds), default=None)
    why = "ranks ended without a word" if first is None else f"{type(first.error).__name__}: {first.error}"
    tell_stderr(f"meshwise: restart {attempt.number} of {attempt.most}, because {why}", final=False)


def _leave(status: int) -> None:
    """End the process with this status, whatever threads still run in it; not with 0 where its output found no room."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - a full disk, or what `main` has put there
        status = status or 1
        traceback.print_exc()
    finally:
        os._exit(status)

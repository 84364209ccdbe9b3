"""Run one rank from start to end in a process that `run` has started, and save its `RankOutcome`.

A rank that blocks in a collective cannot run Python signal handlers. So signals (Ctrl-C, or from the launcher) end it
by their default action. A rank ends by `os._exit`, because torch's threads may abort an interpreter that exits.

    | meshwise-job-x1y2/         folder of the job, in the system's temporary folder
    |   start-0/  0  1  …        a pickled `RankOutcome` of each rank, for each start of the ranks
    |   logs/                    log files of torch's launcher

Unlike an exit status or a pipe, a file is complete even if the process dies right afterwards. The file has the time of
the error, so the first of several errors is known. `results` and `first_error` read the files for `run`."""

import atexit
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.launcher_info import JobAttempt, LauncherProcess, RankKilledError, RankLostError
from meshwise.comm.launch.connect import connected_world
from meshwise.comm.launch.fork_server import END_SIGNALS, LauncherEnvironment

POLL_SECONDS = 0.1
"""Seconds between two checks of the ranks by the launcher."""

SIGNALS = (signal.SIGINT, *END_SIGNALS)
"""Signals on which a launcher ends its ranks, and which end a rank."""

CONSEQUENCE_SECONDS = 30 * POLL_SECONDS
"""Seconds that a rank stays alive after it failed because another rank was lost. In this time the launcher notices the
rank that ended first, even on an overloaded machine, and ends this rank."""


def start_folder(folder: Path, *, number: int) -> Path:
    """Return the folder for the outcomes of one start of the ranks. number: 0 for the first start."""
    return folder / f"start-{number}"


def last_start(folder: Path) -> Path:
    """Return the folder with the outcomes of the last start; `folder` itself if no rank has started."""
    return max(folder.glob("start-*"), key=lambda path: int(path.name.rpartition("-")[2]), default=folder)


@dataclass(frozen=True)
class RankOutcome:
    """Result of `main` on one rank, or the exception that ended the rank."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    """Traceback of `error` as text, without its message."""
    seconds: float = 0.0
    """Time when the exception was raised, by `time.time`; 0 for a result."""

    @classmethod
    def of(cls, error: BaseException) -> "RankOutcome":
        """Return the outcome of a rank that ends now with the exception `error`."""
        text, message = map("".join, (traceback.format_exception(error), traceback.format_exception_only(error)))
        return cls(error=picklable(error), trace=text.removesuffix(message), seconds=time.time())

    @property
    def is_consequence(self) -> bool:
        """True if the rank failed because another rank was lost."""
        return isinstance(self.error, RankLostError)

    @property
    def exited_cleanly(self) -> bool:
        """True if the rank called `sys.exit` with status 0."""
        return isinstance(self.error, SystemExit) and not self.error.code

    def save(self, folder: Path, *, rank: int) -> None:
        """Write the outcome of `rank` into the existing `folder` (see `start_folder`). Raises the exception of pickle.

        If this outcome is a consequence and another is stored, keep the other: the watchdog may have written a better
        one."""
        if self.is_consequence and self.exists(folder, rank=rank):
            return
        try:
            data = pickle.dumps(self)
        except Exception as error:
            kind = type(self.result).__name__
            error.add_note(f"main returned a {kind}, which cannot be pickled; return a list of tensors, for example")
            raise
        (folder / f"{rank}.writing").write_bytes(data)
        (folder / f"{rank}.writing").rename(folder / str(rank))

    @staticmethod
    def exists(folder: Path, *, rank: int) -> bool:
        """Return whether `rank` has written an outcome."""
        return (folder / str(rank)).exists()

    @classmethod
    def load(cls, folder: Path, *, rank: int) -> "RankOutcome | None":
        """Return the outcome that `rank` wrote into `folder`, or None if it wrote none."""
        if not cls.exists(folder, rank=rank):
            return None
        outcome = pickle.loads((folder / str(rank)).read_bytes())
        assert isinstance(outcome, cls)
        return outcome


def results(folder: Path, *, size: int) -> list[Any]:
    """Return the results of `main`, by rank, after all processes ended with status 0.

    Raises the exception of `first_error` if a rank has stored one, such as a `sys.exit` with status 0."""
    outcomes = [RankOutcome.load(folder, rank=rank) for rank in range(size)]
    if any(outcome is not None and outcome.error is not None for outcome in outcomes):
        raise first_error(folder, size=size, statuses={})
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None, f"rank {rank} succeeded and left no result"
    return [outcome.result for outcome in outcomes if outcome is not None]


def first_error(folder: Path, *, size: int, statuses: Mapping[int, int]) -> BaseException:
    """Return the exception that `run` raises. statuses: exit status of each failed process, by rank; minus the signal's
    number for a process that a signal ended.

    | some rank raised by itself           the first such exception
    | all are consequences of an end       RankLostError for the rank that ended without an outcome; without such a rank
    |                                      the first exception
    | some ranks, not all, left by         RankLostError for the first of them
    | `sys.exit` with status 0"""
    outcomes = {rank: RankOutcome.load(folder, rank=rank) for rank in range(size)}
    raised = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None and outcome.error is not None}
    silent = [rank for rank in statuses if rank not in raised]
    if not silent or any(not outcome.is_consequence and not outcome.exited_cleanly for outcome in raised.values()):
        rank, first = min(raised.items(), key=lambda it: (it[1].exited_cleanly, it[1].is_consequence, it[1].seconds))
        assert first.error is not None
        if first.exited_cleanly and not all(each is not None and each.exited_cleanly for each in outcomes.values()):
            error: BaseException = RankLostError(f"rank {rank} of {size} left by sys.exit, but other ranks did not")
            return _with_notes(error, {other: each for other, each in raised.items() if other != rank})
        if first.trace:
            first.error.add_note(f"raised on rank {rank} of {size}:\n{first.trace.rstrip()}")
        return first.error
    status = statuses[silent[0]]
    kind = RankKilledError if status == -signal.SIGKILL else RankLostError
    error = _with_notes(kind(_ended(silent, size=size, status=status)), raised)
    if kind is RankKilledError:
        error.add_note(
            "the system kills a process when memory runs out. To see what a plan needs, and a change that fits: "
            "print(mw.needs(model, plan, loss=loss, batch=batch))"
        )
    return error


def _ended(ranks: Sequence[int], *, size: int, status: int) -> str:
    if not status:
        *first, last = map(str, ranks)
        who = f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
        return f"{who} of {size} ended with exit status 0 and no result; some code called os._exit, or C's exit"
    names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
    how = f"killed by {names.get(-status, f'signal {-status}')}" if status < 0 else f"with exit status {status}"
    return f"rank {ranks[0]} of {size} ended without an exception, {how}"


def _with_notes(error: BaseException, others: Mapping[int, RankOutcome]) -> BaseException:
    for rank, outcome in others.items():
        error.add_note(f"rank {rank} then failed: {outcome.error}")
    return error


def picklable(error: BaseException) -> BaseException:
    """Return `error` itself if pickle can copy it, else a RuntimeError with its type name, message and notes."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - pickle may call any code of the exception's class
        copy = None
    if isinstance(copy, type(error)) and str(copy) == str(error):
        return error
    replacement = RuntimeError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", []):
        replacement.add_note(note)
    return replacement


def rank_main(
    folder: Path, environment: LauncherEnvironment, main: Callable[..., Any], args: tuple[Any, ...], device: str | None
) -> None:
    """Call `main(world, *args)` on the world of this rank, save the outcome, and end the process; do not return.
    folder: folder of the job, for the outcomes. environment: settings of the launcher. device: as in `run`."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # a signal that is ignored now stays ignored
            signal.signal(number, signal.SIG_DFL)
    environment.enter()
    # All ranks write to the same terminal or file, so each writes whole lines. Parts of lines would mix when a buffer
    # is full, or with PYTHONUNBUFFERED. Each line is out before a rank can be killed.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    if LauncherProcess().is_gone():
        _leave(1)
    atexit.register(_leave, 0)
    rank = int(os.environ["RANK"])
    attempt = JobAttempt.current()
    assert attempt is not None, "torch's launcher names the start"
    folder = start_folder(folder, number=attempt.restarts)

    def take_report(report: str) -> None:
        RankOutcome(error=RanksDisagree(report), seconds=time.time()).save(folder, rank=rank)

    try:
        folder.mkdir(exist_ok=True)
        torch.set_num_threads(threads_from_environment() or torch.get_num_threads())
        world = connected_world(device, sink=take_report)
        try:
            outcome = RankOutcome(main(world, *args))
        except SystemExit as left:
            outcome = RankOutcome.of(left)
            if not outcome.exited_cleanly:
                raise
        world.close()
        outcome.save(folder, rank=rank)
    except BaseException as error:  # noqa: BLE001 - the launcher reports every exception that ended this rank
        try:
            outcome = RankOutcome.of(error)
            try:
                outcome.save(folder, rank=rank)
            except OSError:  # for example a full disk; then this process prints the exception itself
                traceback.print_exc()
            if outcome.is_consequence:
                time.sleep(CONSEQUENCE_SECONDS)
        finally:  # an exception here would give status 0, and the launcher would wait for a result
            _leave(1)


def threads_from_environment() -> int | None:
    """Return the number of threads in OMP_NUM_THREADS; of a list such as `4,2`, the first number. Return None without
    the variable, and for a value that is no number above 0, which OpenMP ignores too."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if re.fullmatch("0*[1-9][0-9]{0,5}", first) else None


def _leave(status: int) -> None:
    """End the process at once with the exit status `status`, or 1 when its output cannot be written."""
    for child in multiprocessing.active_children():
        if child.daemon:  # a data worker, for example; multiprocessing ends these at exit
            child.terminate()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # a closed stream is None
            stream.flush()
    except Exception:  # noqa: BLE001 - a full disk, or an error of a stream that `main` has installed
        status = status or 1
        traceback.print_exc()
    finally:
        os._exit(status)

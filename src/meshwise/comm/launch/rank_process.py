"""Run one rank from start to end in a process that `run` has started, and save its `RankOutcome`.

A rank that blocks in a collective cannot run Python signal handlers. So signals (Ctrl-C, or from the launcher) end it
by their default action. A rank ends by `os._exit`, because torch's threads may abort an interpreter that exits."""

import atexit
import functools
import io
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.job_attempt import JobAttempt
from meshwise.comm.api.process_life import LauncherProcess
from meshwise.comm.health.watchdog import report_to_stderr
from meshwise.comm.launch.connect import connected_world
from meshwise.comm.launch.fork_server import ENDING, LauncherEnvironment
from meshwise.comm.launch.rank_outcome import RankOutcome, first_error, load_statuses, start_folder

POLL_SECONDS = 0.1
"""Seconds between two checks of the ranks by the launcher."""

SIGNALS = (signal.SIGINT, *ENDING)
"""Signals on which a launcher ends its ranks, and which end a rank."""

CONSEQUENCE_SECONDS = 30 * POLL_SECONDS
"""Seconds that a rank stays alive after it failed because another rank was lost.

In this time, even an overloaded machine's launcher notices the rank that ended first, and ends this rank."""


def rank_main(
    folder: Path, environment: LauncherEnvironment, main: Callable[..., Any], args: tuple[Any, ...], device: str | None
) -> None:
    """Call `main(world, *args)` on the world of this rank, save the outcome, and end the process; do not return.
    folder: folder of the job, in which outcomes are saved. environment: settings of the launcher. device: as in `run`.
    """
    _die_of(SIGNALS)
    environment.enter()
    _keep_lines_whole()
    if LauncherProcess().is_gone():
        _leave(1)
    atexit.register(_leave, 0)
    rank = int(os.environ["RANK"])
    attempt = JobAttempt.current()
    assert attempt is not None, "torch's launcher names the start"
    starts, folder = folder, start_folder(folder, number=attempt.restarts)

    def take_report(report: str) -> None:
        RankOutcome(error=RanksDisagree(report), seconds=time.time()).save(folder, rank=rank)

    try:
        folder.mkdir(exist_ok=True)
        if rank == 0 and attempt.restarts:
            _print_restart_reason(starts, attempt)
        torch.set_num_threads(asked_threads() or torch.get_num_threads())
        world = connected_world(device, sink=take_report)
        outcome = _outcome(functools.partial(main, world, *args))
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


def _die_of(numbers: Collection[signal.Signals]) -> None:
    """Let these signals end the process by their default action; a signal that is ignored now stays ignored."""
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _keep_lines_whole() -> None:
    """Write output one whole line at a time, because all ranks write to the same terminal or file. Otherwise parts of
    lines would mix when a buffer is full, or with PYTHONUNBUFFERED. Each line is out before a rank can be killed."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _outcome(main: Callable[[], Any]) -> RankOutcome:
    """Return the outcome of `main`: its result, or a `sys.exit` with status 0. Other exceptions are raised."""
    try:
        return RankOutcome(main())
    except SystemExit as left:
        outcome = RankOutcome.of(left)
        if outcome.exited_cleanly:
            return outcome
        raise


def asked_threads() -> int | None:
    """Return the number of threads in OMP_NUM_THREADS; of a list such as `4,2`, the first number. Return None without
    the variable, and for a value that is no number above 0, which OpenMP ignores too."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if re.fullmatch("0*[1-9][0-9]{0,5}", first) else None


def _print_restart_reason(folder: Path, attempt: JobAttempt) -> None:
    """Print why the ranks were started again: the first error of the previous start. folder: folder of the job."""
    previous = start_folder(folder, number=attempt.restarts - 1)
    error = first_error(previous, size=int(os.environ["WORLD_SIZE"]), statuses=load_statuses(previous))
    why = f"{type(error).__name__}: {error}"
    report_to_stderr(f"meshwise: restart {attempt.restarts} of {attempt.max_restarts}, because {why}")


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

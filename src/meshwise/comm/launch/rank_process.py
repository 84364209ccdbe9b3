"""Run one rank from start to end, in a process that `run` has started; it leaves a `RankOutcome`.

A rank that blocks in a collective cannot handle Ctrl-C or the signal of a lost launcher: both end it at once. A rank
that worked cannot fail at interpreter exit, where threads of torch may abort the process.
"""

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
from meshwise.comm.launch.fork_server import ENDING, LauncherEnvironment
from meshwise.comm.launch.joining import joined
from meshwise.comm.launch.rank_outcome import RankOutcome, first_error, load_statuses, start_folder

POLL_SECONDS = 0.1
"""How often the launcher looks at its ranks."""

SIGNALS = (signal.SIGINT, *ENDING)
"""Signals that a launcher passes on to its ranks."""

CONSEQUENCE_SECONDS = 30 * POLL_SECONDS
"""Longer than a launcher takes, on a machine with too much to do as well, to notice the rank that ended first: it ends
the others then.
"""


def rank_main(
    folder: Path, environment: LauncherEnvironment, main: Callable[..., Any], args: tuple[Any, ...], device: str | None
) -> None:
    """Run one rank from start to end; `folder` is the folder of the job."""
    _die_of(SIGNALS)
    environment.enter()
    _keep_lines_whole()
    if LauncherProcess().is_gone():
        _leave(1)
    atexit.register(_leave, 0)
    rank = int(os.environ["RANK"])
    attempt = JobAttempt.current()
    assert attempt is not None, "torch's launcher names the start"
    starts, folder = folder, start_folder(folder, number=attempt.number)

    def take_report(report: str, *, final: bool) -> None:
        if final:
            RankOutcome(error=RanksDisagree(report), seconds=time.time()).save(folder, rank=rank)
        else:
            report_to_stderr(report, final=final)

    try:
        folder.mkdir(exist_ok=True)
        if rank == 0 and attempt.number:
            _print_restart_reason(starts, attempt)
        torch.set_num_threads(asked_threads() or torch.get_num_threads())
        world = joined(device, sink=take_report)
        outcome = _outcome(functools.partial(main, world, *args))
        world.close()
        outcome.save(folder, rank=rank)
    except BaseException as error:  # noqa: BLE001 - the launcher reports whatever ended this rank
        try:
            outcome = RankOutcome.of(error)
            try:
                outcome.save(folder, rank=rank)
            except OSError:  # a full disk, for example: then it is printed here
                traceback.print_exc()
            if outcome.is_consequence:
                time.sleep(CONSEQUENCE_SECONDS)
        finally:  # an exception that left here would end the process with status 0, and the launcher wait for a result
            _leave(1)


def _end_workers() -> None:
    """End the data workers with this process, as multiprocessing does at the end of a process."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()


def _die_of(numbers: Collection[signal.Signals]) -> None:
    """Let these signals end the process by their default action, except those that its parent makes it ignore."""
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _keep_lines_whole() -> None:
    """Print whole lines at a time. Ranks write to the same place, where pieces of lines would mix: those that a full
    buffer cuts off, or every word with PYTHONUNBUFFERED. Printed lines also survive when the rank is killed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _outcome(main: Callable[[], Any]) -> RankOutcome:
    """Return the outcome of `main`: its result, or a successful `sys.exit`."""
    try:
        return RankOutcome(main())
    except SystemExit as left:
        outcome = RankOutcome.of(left)
        if outcome.left_well:
            return outcome
        raise


def asked_threads() -> int | None:
    """Return the threads of a rank by OMP_NUM_THREADS, which may be a list with a number for each level.

    None for a value that is no number above 0, which OpenMP ignores too.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if re.fullmatch("0*[1-9][0-9]{0,5}", first) else None


def _print_restart_reason(folder: Path, attempt: JobAttempt) -> None:
    """Print why the ranks are started again, from the outcomes of the last start."""
    previous = start_folder(folder, number=attempt.number - 1)
    error = first_error(previous, size=int(os.environ["WORLD_SIZE"]), statuses=load_statuses(previous))
    why = f"{type(error).__name__}: {error}"
    report_to_stderr(f"meshwise: restart {attempt.number} of {attempt.most}, because {why}", final=False)


def _leave(status: int) -> None:
    """End the process with this status, whatever threads still run in it; with 1 when its output cannot be written."""
    _end_workers()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # none of one that is closed
            stream.flush()
    except Exception:  # noqa: BLE001 - a full disk, or what `main` has put there
        status = status or 1
        traceback.print_exc()
    finally:
        os._exit(status)

"""Store the result or exception of each rank in a file, from which `run` makes its result or raises its error.

    | meshwise-job-x1y2/         folder of the job, in the system's temporary folder
    |   start-0/  0  1  …        a pickled `RankOutcome` of each rank, for each start of the ranks
    |   logs/                    log files of torch's launcher

Unlike an exit status or a pipe, a file is complete even if the process dies right afterwards. It holds the time of the
error, from which the first of several errors is known."""

import contextlib
import json
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.comm.api.rank_lost import RankKilledError, RankLostError

_STATUSES = "statuses"


@contextlib.contextmanager
def job_folder() -> Iterator[Path]:
    """Make a temporary folder for a job, and remove it after the block."""
    with tempfile.TemporaryDirectory(prefix="meshwise-job-", ignore_cleanup_errors=True) as name:
        yield Path(name)


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
        return cls(error=_picklable(error), trace=text.removesuffix(message), seconds=time.time())

    @property
    def is_consequence(self) -> bool:
        """True if the rank failed because another rank was lost."""
        return isinstance(self.error, RankLostError)

    @property
    def exited_cleanly(self) -> bool:
        """True if the rank called `sys.exit` with status 0."""
        return isinstance(self.error, SystemExit) and not self.error.code

    def save(self, folder: Path, *, rank: int) -> None:
        """Write the outcome of `rank` into `folder`, made by `start_folder`. Raises the exception of pickle. If this
        outcome is a consequence and another is stored, keep the other: the watchdog may have written a better report.
        """
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
    """Return the results of `main`, by rank. Raises `first_error` when a rank has called `sys.exit` with status 0."""
    outcomes = [RankOutcome.load(folder, rank=rank) for rank in range(size)]
    if any(outcome is not None and outcome.error is not None for outcome in outcomes):
        raise first_error(folder, size=size, statuses={})
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None, f"rank {rank} succeeded and left no result"
    return [outcome.result for outcome in outcomes if outcome is not None]


def save_statuses(folder: Path, *, statuses: Mapping[int, int]) -> None:
    """Store the exit statuses of failed ranks, by rank, in the folder of their outcomes. A full disk is ignored."""
    with contextlib.suppress(OSError):  # only the message about a restart needs the statuses
        (folder / _STATUSES).write_text(json.dumps(list(statuses.items())), encoding="utf-8")


def load_statuses(folder: Path) -> Mapping[int, int]:
    """Return the exit statuses that `save_statuses` stored in `folder`, by rank; empty if there are none."""
    try:
        return dict(json.loads((folder / _STATUSES).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def first_error(folder: Path, *, size: int, statuses: Mapping[int, int]) -> BaseException:
    """Return the exception that `run` raises: the first one in `folder` that is no consequence of another rank's end.
    If all are consequences, it is a RankLostError for the rank that ended without an outcome. statuses: exit status of
    each failed process, by rank; minus the signal's number for a process that a signal ended."""
    outcomes = {rank: RankOutcome.load(folder, rank=rank) for rank in range(size)}
    raised = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None and outcome.error is not None}
    silent = [rank for rank in statuses if rank not in raised]
    if not silent and not raised:
        return RankLostError("ranks ended without an exception and without an exit status")
    if not silent or any(not outcome.is_consequence and not outcome.exited_cleanly for outcome in raised.values()):
        rank, first = min(
            raised.items(), key=lambda item: (item[1].exited_cleanly, item[1].is_consequence, item[1].seconds)
        )
        assert first.error is not None
        if first.exited_cleanly and not all(
            outcome is not None and outcome.exited_cleanly for outcome in outcomes.values()
        ):
            error: BaseException = RankLostError(f"rank {rank} of {size} left by sys.exit, but other ranks did not")
            return _with_notes(error, {other: each for other, each in raised.items() if other != rank})
        if first.trace:
            first.error.add_note(f"raised on rank {rank} of {size}:\n{first.trace.rstrip()}")
        return first.error
    rank = silent[0]
    status = statuses[rank]
    kind = RankKilledError if status == -signal.SIGKILL else RankLostError
    error = _with_notes(kind(_ended(silent, size=size, status=status)), raised)
    if kind is RankKilledError:
        error.add_note(
            "the system does that when memory runs out; what a plan needs, and a change that fits: "
            "print(mw.needs(model, plan, loss=loss, batch=batch))"
        )
    return error


def _ended(ranks: Sequence[int], *, size: int, status: int) -> str:
    if not status:
        *first, last = map(str, ranks)
        who = f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
        return f"{who} of {size} ended with exit status 0 and no result; code there calls os._exit, or C's exit"
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
    return f"rank {ranks[0]} of {size} ended without an exception, {how}"


def _with_notes(error: BaseException, others: Mapping[int, RankOutcome]) -> BaseException:
    for rank, outcome in others.items():
        error.add_note(f"rank {rank} then met: {outcome.error}")
    return error


def _picklable(error: BaseException) -> BaseException:
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

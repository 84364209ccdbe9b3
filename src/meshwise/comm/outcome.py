"""What became of a rank, written where the process that started it will look.

A rank's result or exception travels in a file, not through the exit status or a pipe: it is there even when the
process dies right afterwards, and of several errors the first can be told from those it caused.
"""

from __future__ import annotations

import pickle
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.comm.lost import RankLostError


@dataclass(frozen=True)
class Outcome:
    """The result of a rank's main, or the exception that ended it, where it was raised (as text) and when."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, error: BaseException) -> Outcome:
        """How `error` ended a rank just now."""
        told, words = map("".join, (traceback.format_exception(error), traceback.format_exception_only(error)))
        return cls(error=_picklable(error), trace=told.removesuffix(words), seconds=time.time())

    @property
    def is_consequence(self) -> bool:
        """Whether the rank only failed because another one was lost."""
        return isinstance(self.error, RankLostError)

    def save(self, folder: Path, *, rank: int) -> None:
        """Write it into the folder that the launcher reads. Raises what pickle raises for a result it cannot take."""
        data = pickle.dumps(self)
        (folder / f"{rank}.writing").write_bytes(data)
        (folder / f"{rank}.writing").rename(folder / str(rank))

    @classmethod
    def load(cls, folder: Path, *, rank: int) -> Outcome | None:
        """What that rank wrote, or None when it ended without a word."""
        file = folder / str(rank)
        if not file.exists():
            return None
        outcome = pickle.loads(file.read_bytes())
        assert isinstance(outcome, cls)
        return outcome


def _picklable(error: BaseException) -> BaseException:
    """The exception itself, or when it cannot travel between processes a RuntimeError of the same words."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does when it is pickled
        copy = None
    if isinstance(copy, type(error)) and str(copy) == str(error):
        return error
    told = RuntimeError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", []):
        told.add_note(note)
    return told


def status_of(error: BaseException) -> int:
    """The exit status that an exception stands for, which is printed where it says what went wrong."""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    traceback.print_exception(error)
    return 1

"""The names of a job's semaphores.

Those that torch's launcher shares with its ranks have names, by which a started process finds them, and multiprocessing
removes them when the launcher ends, or a process beside it does that notices its end. When all are killed at once
nobody does, and multiprocessing's names do not tell whose they were. These are called after the job's folder, and go
where what a killed job has left of it goes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from multiprocessing import process
from pathlib import Path

_PLACE = Path("/dev/shm")  # noqa: S108 - where Linux has them
_PREFIX = "semprefix"


@contextlib.contextmanager
def named_after(folder: Path) -> Iterator[None]:
    """Let the semaphores of this process, and of those that it starts, be called after this folder."""
    named = vars(process.current_process())["_config"]
    kept = named[_PREFIX]
    if sys.platform == "linux":  # elsewhere a name has 31 characters at most
        named[_PREFIX] = f"/{folder.name}"
    try:
        yield
    finally:
        named[_PREFIX] = kept


def remove_named_after(folder: Path) -> None:
    """Remove what a job that was killed has left."""
    for path in _PLACE.glob(f"sem.{folder.name}-*"):
        with contextlib.suppress(OSError):
            path.unlink()

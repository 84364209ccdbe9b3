"""The names of a job's semaphores.

Those that torch's launcher shares with its ranks have names, by which a started process finds them, and multiprocessing
removes them when the launcher ends, or a process beside it does that notices its end. When all are killed at once
nobody does, and multiprocessing's names do not tell whose they were. These are called after the job's folder, and go
where what a killed job has left of it goes. Those that ranks make themselves have multiprocessing's names.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing import process
from pathlib import Path

_PLACE = Path("/dev/shm")  # noqa: S108 - where Linux has them
_PREFIX = "semprefix"
_lock = threading.Lock()


class NoSemaphoresError(OSError):
    """This machine has no room for the semaphores of a job."""


@contextlib.contextmanager
def named_after(folder: Path) -> Iterator[None]:
    """Let the semaphores that this process makes be called after this folder, one job at a time."""
    named = vars(process.current_process())["_config"]
    with _lock:
        kept = named[_PREFIX]
        if sys.platform == "linux":  # elsewhere a name has 31 characters at most
            named[_PREFIX] = f"/{folder.name}"
        try:
            yield
        finally:
            named[_PREFIX] = kept


def not_named_after(folder: Path) -> None:
    """Let those that this rank makes be called as multiprocessing calls any: it has its launcher's name for them."""
    named = vars(process.current_process())["_config"]
    if named[_PREFIX] == f"/{folder.name}":
        named[_PREFIX] = "/mp"


def require(method: str, *, size: int) -> None:
    """Raise NoSemaphoresError, which says what to do, where there is no room for those of so many ranks."""
    context = multiprocessing.get_context(method)
    try:
        _all_at_once = [context.Event(), *(context.Lock() for _ in range(2 * size))]
    except OSError as error:
        code = error.errno or errno.ENOSPC
        raise NoSemaphoresError(
            code,
            f"{os.strerror(code)}: to start {size} ranks takes {5 + 2 * size} semaphores, of a page each, in {_PLACE}; "
            f"give it room (mount -o remount,rw,size=64m {_PLACE}, or docker run --shm-size=64m), or start the ranks "
            "with torchrun, which needs none",
        ) from error


def remove_named_after(folder: Path) -> None:
    """Remove what a job that was killed has left."""
    for path in _PLACE.glob(f"sem.{folder.name}-*"):
        with contextlib.suppress(OSError):
            path.unlink()

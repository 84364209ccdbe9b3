"""The names of a job's semaphores.

Semaphores that torch's launcher shares with its ranks have names, by which a started process finds them.
multiprocessing removes them when the launcher ends; its tracker process does so when the launcher is killed. When all
are killed at once the semaphores stay, and multiprocessing's names do not show whose they were. These are called after
the job's folder, and go where what a killed job has left of it goes. Those that ranks make themselves have
multiprocessing's names.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing import process
from pathlib import Path

_PLACE = Path("/dev/shm")  # noqa: S108 - where Linux has them
_PREFIX = "semprefix"
_DEFAULT = "/mp"
_REFUSED = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSYS)


class NoSemaphoresError(OSError):
    """Raised when the machine has no room for the semaphores of a job."""


@contextlib.contextmanager
def named_after(folder: Path) -> Iterator[None]:
    """Let the semaphores that this process makes to start the ranks of a job be called after this folder, for one job
    at a time. Raises NoSemaphoresError, which says what to do, where there is no room for them.
    """
    named = vars(process.current_process())["_config"]
    with _turn():
        kept = named[_PREFIX]
        if sys.platform == "linux":  # elsewhere a name has 31 characters at most
            named[_PREFIX] = f"/{folder.name}"
        try:
            yield
        except OSError as error:
            if error.errno in _REFUSED and error.filename is None:  # multiprocessing names no file for them
                raise _refusal(error.errno) from error
            raise
        finally:
            named[_PREFIX] = kept


def named_as_ever() -> None:
    """Let those that a rank makes, or a copy of its launcher, be called as multiprocessing calls any."""
    vars(process.current_process())["_config"][_PREFIX] = _DEFAULT
    _turn.cache_clear()


@functools.cache
def _turn() -> threading.Lock:
    return threading.Lock()


def _refusal(code: int) -> NoSemaphoresError:
    return NoSemaphoresError(
        code,
        f"{os.strerror(code)}: to start ranks takes semaphores in {_PLACE}, two for each and five, of a page each; "
        f"give it room (mount -o remount,rw,size=64m {_PLACE}, or docker run --shm-size=64m), or start the ranks with "
        "torchrun, which needs none",
    )


def remove_named_after(folder: Path) -> None:
    """Remove what a job that was killed has left."""
    for path in _PLACE.glob(f"sem.{folder.name}-*"):
        with contextlib.suppress(OSError):
            path.unlink()

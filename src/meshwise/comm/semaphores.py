"""The names of the semaphores that torch's launcher shares with its ranks.

multiprocessing gives each a name, by which a process that it starts finds it, and keeps it until the launcher ends.
What has a name outlives processes that are all killed at once. Nobody needs these any more once every rank has opened
its own, so they are removed then. Until then they are called after the job's folder, and go with it (`sweep`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from multiprocessing import process, synchronize, util
from pathlib import Path

_PLACE = Path("/dev/shm")  # noqa: S108 - where Linux has them
_PREFIX = "semprefix"


@contextlib.contextmanager
def named_after(folder: Path) -> Iterator[None]:
    """Let those that are made here be called after this folder."""
    named = vars(process.current_process())["_config"]
    kept = named[_PREFIX]
    if sys.platform == "linux":  # elsewhere a name may be too long
        named[_PREFIX] = f"/{folder.name}"
    try:
        yield
    finally:
        named[_PREFIX] = kept


def forget(folder: Path) -> None:
    """Remove the names that are called after this folder, as multiprocessing would when this process ends."""
    for ending in list(vars(util)["_finalizer_registry"].values()):
        known = vars(ending)
        if known.get("_callback") is _cleanup() and known["_args"][0].startswith(f"/{folder.name}-"):
            ending()


def sweep(folder: Path) -> None:
    """Remove the names that a launcher which was killed has left."""
    for path in _PLACE.glob(f"sem.{folder.name}-*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _cleanup() -> object:
    return synchronize.SemLock._cleanup  # type: ignore[attr-defined] # as multiprocessing has it

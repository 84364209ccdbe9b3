"""Silence ranks whose launcher ended before it had sent them their work. Only the server that forks ranks imports it
(`fork_server`).

Such a rank fails inside multiprocessing: its data breaks off, or names a semaphore or socket that ended with the
launcher. The error would look like a failure of the job. While the launcher lives, errors are reported as usual: a
function that a rank cannot import, for example. A launcher that is ended removes its files first: where something is
missing its end may be about to come, and is waited for.
"""

from __future__ import annotations

import pickle
import select
import sys
from multiprocessing import spawn
from types import TracebackType

_ORDINARY = sys.excepthook
_MISSED = (OSError, EOFError, pickle.UnpicklingError)
_ENDING_SECONDS = 5.0
"""For a launcher to end that has removed its files, on a machine with other work to do."""


def _tell(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    if not _orphaned(at, patience=_ENDING_SECONDS if isinstance(error, _MISSED) else 0.0):
        _ORDINARY(kind, error, at)


def _orphaned(at: TracebackType | None, *, patience: float) -> bool:
    """Return whether the error came while a rank received its work from a process that closes the connection within a
    second.
    """
    while at is not None and at.tb_frame.f_code is not spawn._main.__code__:
        at = at.tb_next
    if at is None:
        return False
    looking = select.poll()
    looking.register(at.tb_frame.f_locals["parent_sentinel"], 0)
    return any(seen & select.POLLHUP for _, seen in looking.poll(1e3 * patience))


sys.excepthook = _tell

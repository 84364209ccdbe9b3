"""Whether a process that is there now has ended.

A file descriptor of the process tells it for good (pidfd). Systems before Linux 5.3 have none, nor have Pythons that
were built for those, as conda's and uv's are: there its number is asked for, which another process may have taken by
then. Such an end is told by the watch, later.
"""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path


class Life:
    """That of another process of this machine."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._file: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self._file = os.pidfd_open(process)

    @property
    def ended(self) -> bool:
        """Whether it has ended. One that only stopped has not."""
        if self._file is None:
            return has_ended(self._process)
        looking = select.poll()  # unlike select.select, of files with any number
        looking.register(self._file, select.POLLIN)
        return bool(looking.poll(0))

    def forget(self) -> None:
        """Nobody asks any more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def has_ended(pid: int) -> bool:
    """Whether a process is no more, or only waits for its parent to ask how it ended. Raises PermissionError."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return state.exists() and state.read_text().rpartition(")")[2].split()[0] in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return True

"""Watch whether another process of this machine has ended.

A file descriptor of a process (pidfd) answers reliably. Linux before 5.3 has none, nor do Python builds for such
systems (conda's, uv's). There the PID is checked, which another process may have taken since; the watchdog notices
that later.
"""

import contextlib
import multiprocessing
import os
import select
from pathlib import Path


class ProcessLife:
    """Another process of this machine, given by its PID."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._file: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self._file = os.pidfd_open(process)

    @property
    def ended(self) -> bool:
        """True when the process has ended, False while it runs or is stopped."""
        if self._file is None:
            return has_ended(self._process)
        looking = select.poll()  # unlike select.select, of files with any number
        looking.register(self._file, select.POLLIN)
        return bool(looking.poll(0))

    def forget(self) -> None:
        """Close the file descriptor of the process."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def has_ended(pid: int) -> bool:
    """Return whether a process has ended or is a zombie. Raises PermissionError for a process of another user."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return state.exists() and state.read_text().rpartition(")")[2].split()[0] in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return True


class LauncherProcess:
    """The process that started this rank: when it ends, the rank ends."""

    def __init__(self) -> None:
        self._starter = os.getppid()
        self._parent = multiprocessing.parent_process()

    def __str__(self) -> str:
        return f"process {self._starter if self._parent is None else self._parent.pid}"

    def is_gone(self) -> bool:
        """Return whether the launcher, or the server that forked this process for it, has ended."""
        return os.getppid() != self._starter or (self._parent is not None and not self._parent.is_alive())

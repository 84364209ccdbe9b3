"""Find out whether another process of this machine has ended.

A file descriptor of a process (pidfd) is reliable. Linux before 5.3 has no pidfd, and Python builds for such
systems (conda's, uv's) cannot open one. Then the PID is checked. If another process has taken over the PID, this check
does not see the end; the watchdog finds it later."""

import contextlib
import multiprocessing
import os
import select
from pathlib import Path


class ProcessLife:
    """Watch over another process of this machine: `ended` is True after its end."""

    def __init__(self, process: int) -> None:
        """Open a pidfd if the system has them. process: PID of the watched process."""
        self._process = process
        self._file: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self._file = os.pidfd_open(process)

    @property
    def ended(self) -> bool:
        """True if the process has ended; False while it runs, and while a signal has stopped it."""
        if self._file is None:
            return has_ended(self._process)
        looking = select.poll()  # select.select refuses file descriptors above 1023
        looking.register(self._file, select.POLLIN)
        return bool(looking.poll(0))

    def close(self) -> None:
        """Close the file descriptor of the process."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, or is a zombie; False for a process of another user."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return state.exists() and state.read_text().rpartition(")")[2].split()[0] in "ZX"
    except PermissionError:
        return False
    except (ProcessLookupError, FileNotFoundError):
        return True


class LauncherProcess:
    """Process that started this rank: torchrun, or the caller of `run`. Make the object in the process of the rank."""

    def __init__(self) -> None:
        self._starter = os.getppid()
        self._parent = multiprocessing.parent_process()

    def __str__(self) -> str:
        return f"process {self._starter if self._parent is None else self._parent.pid}"

    def is_gone(self) -> bool:
        """Return whether the launcher has ended, or the fork server has that forked this process for the launcher."""
        return os.getppid() != self._starter or (self._parent is not None and not self._parent.is_alive())

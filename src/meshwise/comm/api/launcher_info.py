"""Describe how a launcher started the processes of a job, and find out whether a process has ended.

torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; `launched_rank` reads and checks them. If only some are
set, `launched_rank` raises: each process would otherwise run alone, as a world of one rank. `JobAttempt` says how often
the launcher has started the ranks again after a failure.

`has_ended` looks for a PID. If another process has taken over the PID, `has_ended` returns False; the watchdog finds
the lost rank later. `rank_lost_error` makes the exception for a rank that ended."""

import multiprocessing
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a rank needs. If WORLD_SIZE is 1, MASTER_ADDR and MASTER_PORT are not used."""

_OF_A_RANK = REQUIRED[:2]
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def launched_rank() -> tuple[int, int] | None:
    """Return (rank, world size) of this process's environment, or None when neither RANK nor WORLD_SIZE is set.
    Raises ValueError when variables are missing or wrong."""
    if not is_under_launcher():
        return None
    if wrong := launch_error(os.environ):
        raise ValueError("; ".join(wrong))
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def is_under_launcher() -> bool:
    """Return whether RANK or WORLD_SIZE is set, to any value."""
    return any(os.environ.get(name) for name in _OF_A_RANK)


def is_rank() -> bool:
    """Return whether RANK is set in the environment of this process."""
    return bool(os.environ.get("RANK"))


def prints_for_job() -> bool:
    """Return whether this process prints the messages of the job: True on rank 0, and in a process without a rank."""
    return not is_rank() or os.environ["RANK"] == "0"


def launch_error(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the error in the launcher's variables and the remedy, or None when the variables are correct."""
    needed = _OF_A_RANK if environment.get("WORLD_SIZE") == "1" else REQUIRED
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        present = [name for name in _OF_A_RANK if environment.get(name)]
        return (
            f"{' and '.join(present)} {'is' if len(present) == 1 else 'are'} set, but not {', '.join(missing)}",
            f"start the ranks with torchrun, or set all of {', '.join(REQUIRED)}, or unset {' and '.join(present)}",
        )
    odd = [name for name in needed if name != "MASTER_ADDR" and not re.fullmatch("[0-9]{1,9}", environment[name])]
    if odd:
        named = ", ".join(f"{name}={environment[name]}" for name in odd)
        return f"not a whole number: {named}", "start the ranks with torchrun, which sets them"
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if rank >= size:
        return (
            f"RANK={rank} in a world of WORLD_SIZE={size}",
            f"number the ranks 0 to {size - 1}, or raise WORLD_SIZE on all ranks" if size else "set WORLD_SIZE above 0",
        )
    return None


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
        """Return whether the launcher has ended, or the fork server from which this process was forked."""
        return os.getppid() != self._starter or (self._parent is not None and not self._parent.is_alive())


class RankLostError(RuntimeError):
    """Raised when another rank ended, or its connection broke."""


class RankKilledError(RankLostError):
    """Raised by the launcher when SIGKILL ended a rank: sent by a user, or by the system when memory ran out."""


def rank_lost_error(peer: int, *, about: object, error: Exception) -> RankLostError:
    """Return the exception for a call that failed because rank `peer` was lost. about: the call, for the message.
    error: the cause; the message quotes it, without torch's prefix and advice."""
    what = re.sub(r"^\[.*?\] | This is typically.*$", "", str(error), flags=re.DOTALL)
    return RankLostError(f"rank {peer} was lost in {about} ({what.rstrip('.')})")


@dataclass(frozen=True)
class JobAttempt:
    """One start of a job's ranks, as the elastic launcher describes it in the environment."""

    job_name: str
    """Name of the job, equal in all attempts."""
    restarts: int = 0
    """Number of restarts before this attempt: 0 for the first."""
    max_restarts: int = 0
    """Largest number of restarts that the launcher allows."""

    @classmethod
    def current(cls) -> "JobAttempt | None":
        """Return the attempt of this process, or None when no elastic launcher has started it."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(os.environ["TORCHELASTIC_RUN_ID"], number, int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")))

    @property
    def is_named(self) -> bool:
        """True if the user named the job: torchrun calls every other job `none`."""
        return self.job_name != "none"


def host_identity() -> str:
    """Return the boot ID of the machine and the host name as one text, equal for all processes of one container only.
    Containers of a machine have different host names, and machines with equal host names have different boot IDs."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{boot} {socket.gethostname()}"

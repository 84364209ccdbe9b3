"""The folder of a job: the ranks that `run` starts leave in it what became of them.

    | meshwise-job-x1y2/         among the temporary files
    |   made-by-meshwise         what tells it from a folder that only has such a name
    |   start-0/  0  1  …        an `Outcome` of each rank, for each start of them
    |   logs/                    torch's

It goes with the job. A killed launcher leaves the folder; the next launcher removes it together with the job's
`semaphores`. Launcher and ranks hold a lock on their folder, which ends with the last of them. It holds no file that a
message points to. What `meshwise bench disk` moves lies in such a folder too, on the disk that it measures.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshwise.comm.launch.job_semaphores import remove_named_after

_PREFIX = "meshwise-job-"
_MARK = "made-by-meshwise"


@contextlib.contextmanager
def job_folder(root: Path | None = None) -> Iterator[Path]:
    """Make a new folder for a job in `root`, by default a temporary one, and remove it after the block. What killed
    jobs of this user have left there is removed first.
    """
    folder = new_folder(Path(tempfile.gettempdir()) if root is None else root)
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove it, with what has held it."""
    shutil.rmtree(folder, ignore_errors=True)
    _, held = _made().pop(folder, (0, None))
    if held is not None:
        os.close(held)


def remove_folders() -> None:
    """Remove all that this process has made and not removed. A copy of it has made none."""
    for folder, (process, _) in list(_made().items()):
        if process == os.getpid():
            remove_folder(folder)


@functools.cache
def _made() -> dict[Path, tuple[int, int | None]]:
    """Folders, the process that has made each, and what holds it."""
    return {}


def hold(folder: Path) -> int | None:
    """Keep it from being removed until this process has ended, or closes this; None where there are no locks."""
    return _locked(folder, fcntl.LOCK_SH)


def start_folder(folder: Path, *, number: int) -> Path:
    """Return the folder in which the ranks of one start leave their outcomes."""
    return folder / f"start-{number}"


def last_start(folder: Path) -> Path:
    """Return the folder with the outcomes of the last start."""
    return max(folder.glob("start-*"), key=lambda path: int(path.name.rpartition("-")[2]), default=folder)


def new_folder(root: Path) -> Path:
    """Return the same until `remove_folder`."""
    _sweep(root)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        with contextlib.suppress(FileNotFoundError):  # another launcher came by before the lock was there
            held = hold(folder)
            if folder.exists():
                (folder / _MARK).touch()
                _made()[folder] = os.getpid(), held
                return folder
            if held is not None:
                os.close(held)


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            if (held := _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)) is not None:
                if (folder / _MARK).exists():
                    remove_named_after(folder)
                    shutil.rmtree(folder, ignore_errors=True)
                else:  # its launcher may have been killed before it was marked
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                os.close(held)


def _locked(folder: Path, how: int) -> int | None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
    except OSError:  # it is held, or this file system has no locks
        os.close(descriptor)
        return None
    return descriptor

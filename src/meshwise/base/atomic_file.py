"""A file that is replaced whole or not at all.

A file that is opened for writing is empty at once. If the disk is full then, what was there before is lost, and so is
what took minutes to find. So the new file grows beside the old one, and takes its name when all of it is on the disk.

    | what is at the path              what becomes of it
    | nothing                          a new file
    | a file                           replaced; the new one has its mode and, where that is allowed, its owner
    | a link                           what it leads to is replaced
    | a file that may not be written   stays: that its folder takes new files makes nobody free to replace it
    | a file whose folder takes none   written where it is
    | a device or a pipe               written as it is
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path


def is_read_only(path: Path) -> bool:
    """Return whether there is something that may not be written."""
    return path.exists() and not os.access(path, os.W_OK)


def write_whole(path: Path, *, write: Callable[[Path], object], aside: Path | None = None) -> None:
    """Let `write` write the file, at the path that it is given. Raises OSError; what was there is there still.

    aside: the path of the new file while it is written, by default a fresh name in the same folder. A writer that is
    alone and writes much names a place: what a killed one has left there is written over, and does not stay for ever.
    """
    if is_read_only(path):
        raise PermissionError(errno.EACCES, "it is read-only", str(path))
    place = path.resolve()
    if path.exists() and not (path.is_file() and os.access(place.parent, os.W_OK)):
        write(path)
        return
    partial = aside or place.with_name(f".partial-{secrets.token_hex(4)}")
    try:
        write(partial)
        flush(partial)
        if place.exists():
            _like(place, partial)
        partial.replace(place)
    except OSError as error:
        if error.filename in (None, str(partial)):  # a write that fails names no file
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Return when the disk has a file, or the names in a folder. Raises OSError, for example when the disk is full:
    some systems report that only now.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _like(old: Path, new: Path) -> None:
    known = old.stat()
    with contextlib.suppress(PermissionError):
        os.chown(new, known.st_uid, known.st_gid)
    new.chmod(stat.S_IMODE(known.st_mode))

"""Replace a file atomically (`write_whole`): readers find the old file or the complete new file.

Opening a file for writing empties it. If the disk is then full, the old and the new content are both lost. So a new
file is written in the same folder, and renamed when all of it is on the disk.

    | at the path                       after `write_whole`
    | nothing                           a new file
    | a file                            replaced; the new file has its mode and, where allowed, its owner
    | a link                            the link's target is replaced
    | a read-only file                  unchanged: PermissionError
    | a file in a read-only folder      overwritten in place, not atomically
    | a device or a pipe                written directly"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path


def is_read_only(path: Path) -> bool:
    """Return whether the path exists and may not be written."""
    return path.exists() and not os.access(path, os.W_OK)


def write_whole(path: Path, *, write: Callable[[Path], object], aside: Path | None = None) -> None:
    """Replace the file at `path` by the file that `write(temporary_path)` writes. After an OSError the old file stays,
    unless it was overwritten in place (see the table of this module).

    aside: the temporary path, by default a new name in the same folder. Give a fixed path for a large file with one
    writer at a time: if a writer is killed, the next writer overwrites the incomplete file."""
    if is_read_only(path):
        raise PermissionError(errno.EACCES, "it is read-only", str(path))
    target = path.resolve()
    if path.exists() and not (path.is_file() and os.access(target.parent, os.W_OK)):
        write(path)
        return
    partial = aside or target.with_name(f".partial-{secrets.token_hex(4)}")
    try:
        write(partial)
        sync_to_disk(partial)
        if target.exists():
            old = target.stat()
            with contextlib.suppress(PermissionError):
                os.chown(partial, old.st_uid, old.st_gid)
            partial.chmod(stat.S_IMODE(old.st_mode))
        partial.replace(target)
    except OSError as error:
        if error.filename in (None, str(partial)):  # None: a failed write() does not know the file's name
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk (fsync). Raises OSError if the disk is full."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

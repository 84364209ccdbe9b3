"""Files that a command writes: refused before the work where they cannot be written, replaced whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from meshwise.base.atomic_file import is_read_only, write_whole
from meshwise.train.job import JobError


def check_outputs(paths: Iterable[Path | None]) -> None:
    """Raise JobError where a file cannot be written for what is there already, or two are the same."""
    given: set[Path] = set()
    for path in filter(None, paths):
        place = path.resolve()
        if path.is_dir():
            raise JobError(f"cannot write {path}: it is a folder; name a file in it")
        folder = next(parent for parent in place.parents if parent.exists())
        if not folder.is_dir():
            raise JobError(f"cannot write {path}: {folder} is a file, no folder")
        if not os.access(folder, os.W_OK) and not os.access(place, os.W_OK):
            raise JobError(f"cannot write {path}: no permission to write to it, or to make files in {folder}")
        if is_read_only(path):
            raise JobError(f"cannot write {path}: it is read-only; name another file, or allow it to be written")
        if place in given and (place.is_file() or not place.exists()):
            raise JobError(f"{path} is named twice, and what is written last would be all that is left; name two files")
        given.add(place)


def write_output(path: Path, *, write: Callable[[Path], object]) -> None:
    """Let `write` write the file, folders included. Raises JobError when it cannot; what was there is there still."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write=write)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error

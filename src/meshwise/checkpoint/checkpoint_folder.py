"""Folders of checkpoints: find the newest, make one appear whole or not at all, remove old ones.

    step-200.partial-3f2a9c01/     a save writes here, and flushes every file to the disk
            │  one rename (`move_into_place`)
            ▼
    step-200/                      only then `latest` names step-200

A crash leaves the new checkpoint, or a folder whose name says that it is partial. A save under an existing name first
renames the old checkpoint, which stays valid under its other name until the new one is in place.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwise.base.atomic_file import flush
from meshwise.checkpoint.checkpoint_errors import Damage, DamageError
from meshwise.checkpoint.checkpoint_index import INDEX, CheckpointIndex, read_index
from meshwise.checkpoint.damage_check import is_valid

LATEST = "latest"
DATA = "rank-*.safetensors"
"""Pattern of the data files of a checkpoint."""

_PARTIAL, _REPLACED = ".partial-", ".replaced-"


@dataclass(frozen=True)
class CheckpointSearch:
    """Result of a search in a root: the newest valid checkpoint, if any, and the problems of newer ones."""

    path: Path | None
    damaged: tuple[tuple[Path, tuple[Damage, ...]], ...]


def checkpoints(root: Path) -> list[tuple[Path, CheckpointIndex | DamageError]]:
    """Return the checkpoints of a root with their indexes, newest first; those with a damaged index last."""
    found: list[tuple[Path, CheckpointIndex | DamageError]] = []
    for path in sorted(_folders(root), reverse=True):
        try:
            found.append((path, read_index(path)))
        except DamageError as error:
            found.append((path, error))
    return sorted(found, key=lambda item: -item[1].sequence if isinstance(item[1], CheckpointIndex) else 1)


def newest_valid(root: Path, *, but: Collection[Path] = ()) -> CheckpointSearch:
    """Return the newest checkpoint, of all `but` some, whose index and file sizes are right. Its bytes are compared
    while they are loaded.
    """
    damaged = []
    path = None
    for folder, index in checkpoints(root):
        if folder in but:
            continue
        if isinstance(index, DamageError):
            damaged.append((folder, index.damages))
        elif path is None:
            path = folder
    return CheckpointSearch(path, tuple(damaged))


def make_partial_folder(folder: Path) -> Path:
    """Return a new folder beside `folder`, to write into. Raises OSError, also where something else is under that
    name.
    """
    if folder.name == LATEST:
        raise FileExistsError(errno.EEXIST, "this name is reserved for the newest checkpoint's name", str(folder))
    if not _may_be_replaced(folder):
        raise FileExistsError(errno.EEXIST, "it exists and is no checkpoint, so it is not replaced", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}{_PARTIAL}{secrets.token_hex(4)}")
    partial.mkdir()
    return partial


def _may_be_replaced(folder: Path) -> bool:
    """Return whether the path may be replaced: nothing is there, or an older checkpoint of this name."""
    return not os.path.lexists(folder) or is_checkpoint(folder) or (folder.is_dir() and not any(folder.iterdir()))


def move_into_place(partial: Path, *, folder: Path) -> None:
    """Rename a complete partial folder to its final name, then point `latest` to it. Raises OSError."""
    flush(partial)
    replaced = None
    if folder.exists():
        replaced = folder.with_name(f"{folder.name}{_REPLACED}{secrets.token_hex(4)}")
        folder.rename(replaced)
    partial.rename(folder)
    flush(folder.parent)
    point_latest(folder)
    if replaced is not None:
        remove(replaced)


def point_latest(folder: Path) -> None:
    """Write the checkpoint's name into `latest`. Raises OSError."""
    partial = folder.with_name(f"{LATEST}{_PARTIAL}{secrets.token_hex(4)}")
    write_flushed(partial, text=f"{folder.name}\n")
    partial.replace(folder.with_name(LATEST))
    flush(folder.parent)


def write_flushed(path: Path, *, text: str) -> None:
    """Write a new file and return when the disk has it. Raises OSError."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def leftovers(root: Path) -> Iterator[Path]:
    """Yield the folders in `root` that unfinished saves have left."""
    if root.is_dir():
        yield from (path for path in root.iterdir() if _PARTIAL in path.name)


def remove(path: Path) -> None:
    """Remove a checkpoint or a leftover; renamed to a partial name first, so that half of it is never loaded."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    if _PARTIAL not in path.name:
        path = path.rename(path.with_name(f"{path.name}{_PARTIAL}{secrets.token_hex(4)}"))
    shutil.rmtree(path)


def is_checkpoint(path: Path) -> bool:
    """Return whether this is a checkpoint, or one that has lost its index."""
    return path.is_dir() and _PARTIAL not in path.name and ((path / INDEX).exists() or any(path.glob(DATA)))


def next_sequence(root: Path) -> int:
    """Return a number larger than the sequence number of every checkpoint in the root."""
    numbers = [index.sequence for _, index in checkpoints(root) if isinstance(index, CheckpointIndex)]
    return max(numbers, default=0) + 1


def remove_quietly(path: Path) -> None:
    """Remove a path if it still exists, ignoring errors of its disk."""
    with suppress(OSError):
        remove(path)


def _folders(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from (path for path in root.iterdir() if is_checkpoint(path))


def prune(root: Path, *, keep_last: int) -> list[Path]:
    """Remove checkpoints that are older than the `keep_last` newest valid ones, and return the removed folders.

    Only a checkpoint whose every byte matches its checksum counts as valid. Damaged ones newer than those stay. Folders
    of failed saves are removed once a newer checkpoint exists. Raises ValueError for keep_last below 1, OSError.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: give at least 1")
    found = [path for path, _ in checkpoints(root)]
    valid: list[Path] = []
    removed: list[Path] = []
    for path in found:
        if len(valid) == keep_last:
            removed.append(path)
        elif is_valid(path):
            valid.append(path)
    if valid:
        newest = (valid[0] / INDEX).stat().st_mtime_ns
        removed += [path for path in leftovers(root) if path.stat().st_mtime_ns < newest]
    for path in removed:
        remove(path)
    return removed

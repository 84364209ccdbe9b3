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
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from meshwise.base.atomic_file import flush, write_whole
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
    folders = filter(is_checkpoint, root.iterdir()) if root.is_dir() else ()
    for path in sorted(folders, reverse=True):
        try:
            found.append((path, read_index(path)))
        except DamageError as error:
            found.append((path, error))
    return sorted(found, key=lambda item: -item[1].sequence if isinstance(item[1], CheckpointIndex) else 1)


def newest_valid(root: Path, *, without: Collection[Path] = ()) -> CheckpointSearch:
    """Return the newest checkpoint whose index and file sizes are right, without those in `without`.

    Loading it compares its bytes with their checksums.
    """
    damaged = []
    path = None
    for folder, index in checkpoints(root):
        if folder in without:
            continue
        if isinstance(index, DamageError):
            damaged.append((folder, index.damages))
        elif path is None:
            path = folder
    return CheckpointSearch(path, tuple(damaged))


def make_partial_folder(folder: Path) -> Path:
    """Return a new folder to write into, in the same root as `folder`.

    Raises OSError, FileExistsError too when `folder` is neither a checkpoint nor an empty folder.
    """
    if folder.name == LATEST:
        raise FileExistsError(errno.EEXIST, "this name is reserved for the newest checkpoint's name", str(folder))
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if os.path.lexists(folder) and not is_checkpoint(folder) and not is_empty:
        raise FileExistsError(errno.EEXIST, "it exists and is no checkpoint, so it is not replaced", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}{_PARTIAL}{secrets.token_hex(4)}")
    partial.mkdir()
    return partial


def move_into_place(partial: Path, *, folder: Path) -> None:
    """Rename a complete partial folder to its final name, then point `latest` to it. Raises OSError."""
    flush(partial)
    replaced = None
    if folder.exists():
        replaced = folder.with_name(f"{folder.name}{_REPLACED}{secrets.token_hex(4)}")
        folder.rename(replaced)
    partial.rename(folder)
    flush(folder.parent)
    write_whole(folder.with_name(LATEST), write=lambda path: path.write_text(f"{folder.name}\n", encoding="utf-8"))
    flush(folder.parent)
    if replaced is not None:
        remove(replaced)


def remove(path: Path) -> None:
    """Remove a checkpoint or what a failed save has left. A first rename prevents that half of it is ever loaded."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    if _PARTIAL not in path.name:
        path = path.rename(path.with_name(f"{path.name}{_PARTIAL}{secrets.token_hex(4)}"))
    shutil.rmtree(path)


def is_checkpoint(path: Path) -> bool:
    """Return whether the path is a checkpoint, also one that has lost its index."""
    return path.is_dir() and _PARTIAL not in path.name and ((path / INDEX).exists() or any(path.glob(DATA)))


def next_sequence(root: Path) -> int:
    """Return a number larger than the sequence number of every checkpoint in the root."""
    numbers = [index.sequence for _, index in checkpoints(root) if isinstance(index, CheckpointIndex)]
    return max(numbers, default=0) + 1


def prune(root: Path, *, keep_last: int) -> list[Path]:
    """Remove checkpoints that are older than the `keep_last` newest valid ones, and return the removed folders.

    Only a checkpoint whose every byte matches its checksum counts as valid. Damaged ones newer than those stay. Folders
    of failed saves are removed once a newer checkpoint exists. Raises ValueError for keep_last below 1, OSError.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: give at least 1")
    valid: list[Path] = []
    removed: list[Path] = []
    for path, _ in checkpoints(root):
        if len(valid) == keep_last:
            removed.append(path)
        elif is_valid(path):
            valid.append(path)
    if valid:
        newest = (valid[0] / INDEX).stat().st_mtime_ns
        removed += [path for path in root.iterdir() if _PARTIAL in path.name and path.stat().st_mtime_ns < newest]
    for path in removed:
        remove(path)
    return removed

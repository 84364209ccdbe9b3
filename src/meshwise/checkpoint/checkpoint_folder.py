"""Checkpoints as folders of a root: how one comes to be there whole or not at all, which is the newest, which go.

    step-200.partial-3f2a9c01/     written aside, every file flushed to the disk
            │  one rename
            ▼
    step-200/                      and only then does `latest` say step-200

A crash leaves either nothing or a folder whose name says that it is partial. A checkpoint that is saved again under the
same name is renamed first, and stays valid under the other name until the second rename.
"""

from __future__ import annotations

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
"""The files of a checkpoint that hold its tensors."""

_PARTIAL, _REPLACED = ".partial-", ".replaced-"


@dataclass(frozen=True)
class CheckpointSearch:
    """Result of a search in a root: the newest valid checkpoint, if any, and the problems of newer ones."""

    path: Path | None
    damaged: tuple[tuple[Path, tuple[Damage, ...]], ...]


def checkpoints(root: Path) -> list[tuple[Path, CheckpointIndex | DamageError]]:
    """Return every checkpoint of a root with its index, newest first; damaged ones without a readable index come
    last.
    """
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


def make_aside(folder: Path) -> Path:
    """Return a new folder beside `folder`, to write into. Raises OSError, also where something else is under that
    name.
    """
    if folder.name == LATEST:
        raise FileExistsError(errno.EEXIST, "the name is that of the file which names the newest one", str(folder))
    if not _may_be_replaced(folder):
        raise FileExistsError(errno.EEXIST, "something is there which is no checkpoint and stays as it is", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f"{folder.name}{_PARTIAL}{secrets.token_hex(4)}")
    aside.mkdir()
    return aside


def _may_be_replaced(folder: Path) -> bool:
    """Return whether the path may be replaced: nothing is there, or an older checkpoint of this name."""
    return not os.path.lexists(folder) or is_checkpoint(folder) or (folder.is_dir() and not any(folder.iterdir()))


def publish(aside: Path, *, folder: Path) -> None:
    """Make a complete folder a checkpoint: one rename, then `latest`. Raises OSError."""
    flush(aside)
    replaced = None
    if folder.exists():
        replaced = folder.with_name(f"{folder.name}{_REPLACED}{secrets.token_hex(4)}")
        folder.rename(replaced)
    aside.rename(folder)
    flush(folder.parent)
    point_latest(folder)
    if replaced is not None:
        remove(replaced)


def point_latest(folder: Path) -> None:
    """Let `latest` name this checkpoint. Raises OSError."""
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
    """Remove a checkpoint or a leftover. Its name says first that it is partial: half of it is never taken for one."""
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
    """Remove the checkpoints of a root that are older than its `keep_last` newest valid ones, and return what went.

    A damaged one is no reason to remove an older one; it stays until that many valid ones are newer. What failed saves
    have left goes when a newer checkpoint is there. Raises ValueError for keep_last below 1, OSError.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: at least one checkpoint has to stay")
    found = [path for path, _ in checkpoints(root)]
    kept: list[Path] = []
    gone: list[Path] = []
    for path in found:
        if len(kept) == keep_last:
            gone.append(path)
        elif is_valid(path):
            kept.append(path)
    if kept:
        newest = (kept[0] / INDEX).stat().st_mtime_ns
        gone += [path for path in leftovers(root) if path.stat().st_mtime_ns < newest]
    for path in gone:
        remove(path)
    return gone

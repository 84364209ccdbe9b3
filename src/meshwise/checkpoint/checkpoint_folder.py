"""Find, check, replace and remove the folders of checkpoints; a new checkpoint appears complete or not at all.

    | runs/demo/checkpoints/            a root: the checkpoints of one run
    |     latest                        a file with the name of the newest one
    |     step-100/                     complete, with a checksum for every MiB
    |         checkpoint.json           the index
    |         rank-00000.safetensors …  the data
    |     step-200.partial-3f2a9c01/    a save writes here, and flushes every file to the disk
    |             │  one rename (`move_into_place`)
    |             ▼
    |     step-200/                     only then `latest` names step-200

A crash leaves either the new checkpoint, or a folder whose name says that it is partial. An existing checkpoint of the
same name is first renamed to `step-200.replaced-…`. It stays valid under that name, and is removed last.
`damages` and `is_valid` compare every byte of a checkpoint with its checksum."""

import errno
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from meshwise.base.atomic_file import sync_to_disk, write_whole
from meshwise.checkpoint.checkpoint_format import (
    BLOCK,
    INDEX,
    CheckpointIndex,
    Damage,
    DamageError,
    TensorEntry,
    read_header,
    read_index,
)
from meshwise.checkpoint.load_state import SourceFile, read_blocks

LATEST = "latest"
"""File of a root that holds the name of the newest checkpoint."""
DATA = "rank-*.safetensors"
"""Pattern of the data files of a checkpoint."""
_PARTIAL, _REPLACED = ".partial-", ".replaced-"


def checkpoints(root: Path) -> list[tuple[Path, CheckpointIndex | DamageError]]:
    """Return (path, index) of each checkpoint of a root, newest first; then (path, error) of each damaged index."""
    found: list[tuple[Path, CheckpointIndex | DamageError]] = []
    folders = filter(is_checkpoint, root.iterdir()) if root.is_dir() else ()
    for path in sorted(folders, reverse=True):
        try:
            found.append((path, read_index(path)))
        except DamageError as error:
            found.append((path, error))
    return sorted(found, key=lambda item: -item[1].sequence if isinstance(item[1], CheckpointIndex) else 1)


def newest_valid(root: Path, *, without: Collection[Path] = ()) -> tuple[Path | None, list[Damage]]:
    """Return the newest checkpoint whose index and file sizes are right, and the damages of all damaged indices.

    Folders in `without` are skipped. The data is not read here: loading compares it with the checksums."""
    found = [(path, index) for path, index in checkpoints(root) if path not in without]
    damaged = [damage for _, index in found if isinstance(index, DamageError) for damage in index.damages]
    return next((path for path, index in found if isinstance(index, CheckpointIndex)), None), damaged


def make_partial_folder(folder: Path) -> Path:
    """Create a partial folder for the checkpoint `folder`, in the same root, and return its path.

    Raises OSError, and FileExistsError if `folder` is named `latest`, or exists and is no checkpoint and not empty."""
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
    """Rename a partial folder to `folder`, in place of an old checkpoint, and write `latest`. Raises OSError."""
    sync_to_disk(partial)
    replaced = None
    if folder.exists():
        replaced = folder.with_name(f"{folder.name}{_REPLACED}{secrets.token_hex(4)}")
        folder.rename(replaced)
    partial.rename(folder)
    sync_to_disk(folder.parent)
    write_whole(folder.with_name(LATEST), write=lambda path: path.write_text(f"{folder.name}\n", encoding="utf-8"))
    sync_to_disk(folder.parent)
    if replaced is not None:
        remove(replaced)


def remove(path: Path) -> None:
    """Remove a checkpoint (first renamed to a partial folder), a partial folder or a file. Raises OSError."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    if _PARTIAL not in path.name:
        path = path.rename(path.with_name(f"{path.name}{_PARTIAL}{secrets.token_hex(4)}"))
    shutil.rmtree(path)


def is_checkpoint(path: Path) -> bool:
    """Return whether the path is a folder with an index or with data files, and not a partial folder."""
    return path.is_dir() and _PARTIAL not in path.name and ((path / INDEX).exists() or any(path.glob(DATA)))


def next_sequence(root: Path) -> int:
    """Return a number larger than every sequence number of a checkpoint in the root."""
    numbers = [index.sequence for _, index in checkpoints(root) if isinstance(index, CheckpointIndex)]
    return max(numbers, default=0) + 1


def prune(root: Path, *, keep_last: int) -> list[Path]:
    """Keep the `keep_last` newest valid checkpoints, remove all older ones, and return the removed paths.

    Only checkpoints whose name ends with a number are counted and removed: `best` stays beside step-100. They are valid
    if every byte matches its checksum; `is_valid` reads each one once. Checkpoints with a damaged index count as the
    oldest. Partial folders older than the newest valid checkpoint are removed too. Raises ValueError for
    `keep_last` below 1. Raises OSError."""
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: give at least 1")
    valid: list[Path] = []
    removed: list[Path] = []
    for path, _ in checkpoints(root):
        if not path.name[-1].isdecimal():
            continue
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


_VERIFIED = "verified"
"""Name of an empty file in a checkpoint; the file means that all bytes were compared with their checksums once."""


def damages(folder: Path) -> Iterator[Damage]:
    """Read a whole checkpoint and yield every damage. If the index is damaged, yield only its damage."""
    try:
        index = read_index(folder)
    except DamageError as error:
        yield from error.damages
        return
    for name in index.files:
        entries: dict[str, TensorEntry] = {}
        try:
            entries = read_header(folder / name)
        except DamageError as error:
            yield from error.damages
        except OSError as error:
            yield Damage(str(folder / name), "a file that can be read", str(error))
            continue
        yield from _altered_blocks(SourceFile(folder / name, index.files[name], entries))


def is_valid(folder: Path) -> bool:
    """Return whether every byte of a checkpoint is as it was written.

    A valid folder gets the file `verified`: later calls compare only its index and its file sizes. Raises OSError."""
    try:
        read_index(folder)
    except DamageError:
        return False
    if not (folder / _VERIFIED).exists():
        if any(True for _ in damages(folder)):
            return False
        (folder / _VERIFIED).touch()
    return True


def _altered_blocks(source: SourceFile) -> Iterator[Damage]:
    """Yield the damage of every block whose bytes do not match their checksum."""
    buffer = torch.empty(BLOCK, dtype=torch.uint8)
    with source.path.open("rb") as file:
        for start in range(0, source.expected.size, BLOCK):
            try:
                width = min(BLOCK, source.expected.size - start)
                read_blocks(source, descriptor=file.fileno(), start=start, into=buffer[:width])
            except DamageError as error:
                yield from error.damages

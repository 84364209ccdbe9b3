"""Which checkpoints go. One counts as kept only when every byte of it has been compared with its checksum."""

from __future__ import annotations

from pathlib import Path

from meshwise.checkpoint.checkpoint_folder import checkpoints, leftovers, remove
from meshwise.checkpoint.checkpoint_index import INDEX
from meshwise.checkpoint.damage_check import is_valid


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

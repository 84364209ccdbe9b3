"""Harm to files, as disks, networks and people do it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

FILES = (
    "checkpoints/{newest}/checkpoint.json",
    "checkpoints/{newest}/rank-00000.safetensors",
    "checkpoints/{newest}/rank-00001.safetensors",
    "checkpoints/latest",
    "metrics.jsonl",
    "job.toml",
)
"""Every kind of file that a run keeps."""


def _truncated(data: bytearray, draw: random.Random) -> bytearray:
    return data[: draw.randrange(len(data))]


def _zeroed(data: bytearray, draw: random.Random) -> bytearray:
    """A part set to zero, in which something was."""
    start = draw.choice([place for place, byte in enumerate(data) if byte])
    stop = min(len(data), start + draw.choice([1, 64, 4096]))
    return data[:start] + bytes(stop - start) + data[stop:]


def _flipped(data: bytearray, draw: random.Random) -> bytearray:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return data


def _in_the_header(data: bytearray, draw: random.Random) -> bytearray:
    """One bit of the first bytes: of a safetensors file, the length of its header and the header."""
    data[draw.randrange(min(len(data), 256))] ^= 1 << draw.randrange(8)
    return data


def _longer(data: bytearray, draw: random.Random) -> bytearray:
    return data + draw.randbytes(draw.choice([1, 4096]))


_MANNERS: dict[str, Callable[[bytearray, random.Random], bytearray]] = {
    "truncated": _truncated,
    "zeroed": _zeroed,
    "flipped": _flipped,
    "flipped in its header": _in_the_header,
    "longer": _longer,
}
MANNERS = (*_MANNERS, "gone", "that of an older checkpoint")


def damage(path: Path, *, manner: str, older: Path, draw: random.Random) -> bool:
    """Harm the file; `older` is the same file of an older checkpoint. False when it has nothing to harm this way."""
    if manner == "gone":
        path.unlink()
    elif manner == "that of an older checkpoint":
        if older == path or not older.exists() or older.read_bytes() == path.read_bytes():
            return False
        shutil.copyfile(older, path)
    else:
        data = bytearray(path.read_bytes())
        if not any(data):
            return False
        path.write_bytes(_MANNERS[manner](data, draw))
    return True

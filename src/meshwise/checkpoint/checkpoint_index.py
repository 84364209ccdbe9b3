"""The index of a checkpoint (`checkpoint.json`): its tensors, the place of each rectangle, and checksums of its files.

    {"format": "meshwise checkpoint 1",
     "sequence": 7,                                      counts the checkpoints of a root; the newest has the largest
     "files": {"rank-00000.safetensors": {"bytes": 8421376, "crc32": ["9ae0daaf", …]}},     one for every MiB
     "tensors": {"parameter/head.weight": {"dtype": "F32", "shape": [50257, 768], "parts": [
          {"file": "rank-00000.safetensors", "entry": "parameter/head.weight@0,0", "offsets": [0, 0], "sizes": [9, 9]},
          …]}},
     "aliases": {"embed.weight": "head.weight"},          other names of tied parameters
     "extra": {…},                                       other saved values, as JSON
     "checksum": "5d41402a"}                             crc32 of the text before this key

The index is the last file that a save writes, so a folder with an index is complete. The crc32 finds torn and altered
bytes; it does not protect against deliberate changes of both data and checksum."""

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError
from meshwise.checkpoint.safetensors_format import DTYPES
from meshwise.layout.layout import Rectangle

INDEX = "checkpoint.json"
"""Name of the index file."""
FORMAT = "meshwise checkpoint 1"
"""Value of the key `format`; an index with another value is refused."""
BLOCK = 1 << 20
"""Bytes of a block, the part of a file that has one checksum; the last block of a file may be shorter."""
_CHECKSUM = ', "checksum": "'
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class StoredRectangle:
    """A rectangle of a logical tensor. Its elements are in the file `file`, under the entry `entry`."""

    file: str
    entry: str
    rectangle: Rectangle


@dataclass(frozen=True)
class StoredTensor:
    """A logical tensor in a checkpoint: its dtype, its full shape, and the rectangles that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredRectangle, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class CheckpointFile:
    """Size of a data file in bytes, and the crc32 of each block, as they were written (empty if not known)."""

    size: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointIndex:
    """Contents of a checkpoint.

    | sequence   number of the save in its root; a later save has a larger number
    | files      data files by name
    | tensors    logical tensors by slot and name, as in `parameter/head.weight`
    | aliases    first name of a tied parameter, by each of its other names
    | extra      other saved values, as JSON"""

    folder: Path
    sequence: int
    files: Mapping[str, CheckpointFile]
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    extra: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.size for file in self.files.values())


def index_text(body: Mapping[str, Any]) -> str:
    """Return the text of an index file: `body` as JSON, with its checksum as the last key."""
    text = json.dumps(body, allow_nan=False)[:-1]
    return f'{text}{_CHECKSUM}{zlib.crc32(text.encode()):08x}"}}\n'


def read_index(folder: Path) -> CheckpointIndex:
    """Read the index of a checkpoint, and compare it with its own checksum and with the sizes of the data files.

    Raises DamageError, with the file and the expected and found value."""
    path = folder / INDEX
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DamageError([Damage(str(path), "the index of a checkpoint", "no such file")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DamageError([Damage(str(path), "the index of a checkpoint", str(error))]) from error
    body, _, end = text.rpartition(_CHECKSUM)
    if not body:
        raise DamageError([Damage(str(path), "a checksum at its end", "none: the file is cut off")])
    if end[:8] != f"{zlib.crc32(body.encode()):08x}":
        raise DamageError([Damage(str(path), f"the checksum {end[:8]}", f"{zlib.crc32(body.encode()):08x}")])
    try:
        index = parse_index(folder, body=json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamageError([Damage(str(path), f"an index of '{FORMAT}'", f"{type(error).__name__}: {error}")]) from error
    if wrong := list(_sizes(index)):
        raise DamageError(wrong)
    return index


def parse_index(folder: Path, *, body: Mapping[str, Any]) -> CheckpointIndex:
    """Return the index from parsed JSON. Raises ValueError, KeyError, TypeError or AttributeError if malformed."""
    if body["format"] != FORMAT:
        raise ValueError(f"the format is {body['format']!r}")
    files = {plain_name(name): _data_file(name, row) for name, row in body["files"].items()}
    tensors = {name: _stored(name, row, files) for name, row in body["tensors"].items()}
    return CheckpointIndex(folder, int(body["sequence"]), files, tensors, dict(body["aliases"]), dict(body["extra"]))


def plain_name(name: str) -> str:
    """Return `name` if it is a file name without a path. Raises ValueError if it could lead out of the folder."""
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise ValueError(f"{name!r} is not the plain name of a file in the folder")
    return name


def _data_file(name: str, row: Mapping[str, Any]) -> CheckpointFile:
    size, checksums = int(row["bytes"]), tuple(int(checksum, 16) for checksum in row["crc32"])
    if size < 0 or len(checksums) != -(-size // BLOCK):
        raise ValueError(f"{len(checksums)} checksums for {name}, a file of {size} bytes")
    return CheckpointFile(size, checksums)


def _stored(name: str, row: Mapping[str, Any], files: Mapping[str, CheckpointFile]) -> StoredTensor:
    dtype, shape = DTYPES[row["dtype"]], tuple(int(size) for size in row["shape"])
    parts = tuple(
        StoredRectangle(
            part["file"],
            str(part["entry"]),
            Rectangle(tuple(map(int, part["offsets"])), tuple(map(int, part["sizes"]))),
        )
        for part in row["parts"]
    )
    if any(part.file not in files for part in parts):
        raise ValueError(f"{name!r} has a part in a file that the index does not list")
    whole = Rectangle((0,) * len(shape), shape)
    inside = all(part.rectangle.overlap(whole) == part.rectangle for part in parts)
    numel = sum(part.rectangle.numel for part in parts)
    if not inside or min(shape, default=0) < 0 or numel != math.prod(shape):
        raise ValueError(f"the parts of {name!r} do not make up a tensor of shape {shape}: they have {numel} elements")
    return StoredTensor(dtype, shape, parts)


def _sizes(index: CheckpointIndex) -> Iterator[Damage]:
    """Yield the damage of each file that is missing, is not a plain file, or has another size than was written."""
    for name, file in index.files.items():
        path = index.folder / name
        try:
            found = os.lstat(path)
        except OSError as error:
            what = error.strerror or str(error)
        else:
            if stat.S_ISREG(found.st_mode) and found.st_size == file.size:
                continue
            what = f"{found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "something that is not a plain file"
        tensors = tuple(key for key, row in index.tensors.items() if any(part.file == name for part in row.parts))
        yield Damage(str(path), f"a file of {file.size} bytes", what, tensors)

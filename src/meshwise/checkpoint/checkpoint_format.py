"""Define the format of a checkpoint: its index (`read_index`) and the headers of its data files (`read_header`).

`checkpoint.json` is the index: the place of each rectangle, and checksums of the files. docs/checkpoints.md shows one.
The index is the last file that a save writes, so a folder with an index is complete. The crc32 finds torn and altered
bytes; it does not protect against deliberate changes of both data and checksum. `Damage` is one damaged place.

A safetensors file (https://huggingface.co/docs/safetensors) begins with eight bytes, the length of its header. Then
come a JSON table of dtypes, shapes and offsets, and the bytes of the tensors. The safetensors library writes all
tensors of a file at once, which doubles the memory of a rank's share. The library also does not return the offset of a
tensor in the file. So `header` makes headers before the tensors exist; the library only checks the files to read."""

import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshwise.layout.layout import Rectangle


@dataclass(frozen=True)
class Damage:
    """A damaged place: the path of its file, the names of its tensors, and the expected and found content, in words."""

    file: str
    expected: str
    found: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = f" and {len(self.tensors) - _SHOWN} more" if len(self.tensors) > _SHOWN else ""
        shown = f" ({', '.join(self.tensors[:_SHOWN])}{more})" if self.tensors else ""
        return f"{self.file}{shown}: expected {self.expected}, found {self.found}"


_SHOWN = 3


class DamageError(RuntimeError):
    """Error for a folder that is a damaged checkpoint or none; `damages` lists all damaged places."""

    def __init__(self, damages: Sequence[Damage]) -> None:
        self.damages = tuple(damages)
        rest = f"\n  and {len(damages) - _SHOWN} more" if len(damages) > _SHOWN else ""
        super().__init__("damaged checkpoint:\n  " + "\n  ".join(map(str, self.damages[:_SHOWN])) + rest)

    def __reduce__(self) -> "tuple[type[DamageError], tuple[tuple[Damage, ...]]]":
        """Pickle only the damages: the message is made again from them."""
        return DamageError, (self.damages,)


class SaveError(RuntimeError):
    """Error for a checkpoint that was not written; it names the failed ranks and reasons. Older checkpoints stay."""


LENGTH_BYTES = 8
"""Bytes at the start of a file that hold the length of its header. The length is a multiple of this number."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to write: all that the header needs, without its elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorEntry(TensorSpec):
    """A tensor in a file. Its bytes are `start` to `stop` (excluded), counted from the beginning of the file."""

    start: int
    stop: int


def header(specs: Iterable[TensorSpec], *, metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file before its first tensor. The tensors follow in the order of `specs`, without gaps.

    `metadata`: more texts for the header's key `__metadata__`. Raises ValueError for a dtype that the format lacks."""
    table: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for spec in specs:
        stop = offset + spec.nbytes
        shape = list(spec.shape)
        table[spec.name] = {"dtype": dtype_name(spec.dtype), "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the entries of a safetensors file, by the name of the tensor.

    Raises DamageError if the file is not safetensors or differs from its header. Raises OSError."""
    with path.open("rb") as file:
        try:
            with safe_open(path, framework="np"):
                pass  # opening compares the header with the size of the file
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            table = json.loads(file.read(length))
            table.pop("__metadata__", None)
            return {name: _entry(name, start=LENGTH_BYTES + length, **row) for name, row in table.items()}
        except (SafetensorError, KeyError) as error:
            raise DamageError([Damage(str(path), "a safetensors file", f"{type(error).__name__}: {error}")]) from error


def _entry(name: str, *, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> TensorEntry:
    """Return the entry of one row of a header; the tensors of the file begin at byte `start`."""
    return TensorEntry(name, DTYPES[dtype], tuple(shape), start + data_offsets[0], start + data_offsets[1])


DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the format. Raises ValueError for a dtype that the format does not have."""
    if dtype not in _NAMES:
        raise ValueError(f"safetensors has no {dtype}; it has {', '.join(str(known) for known in _NAMES)}")
    return _NAMES[dtype]


INDEX = "checkpoint.json"
FORMAT = "meshwise checkpoint 1"
"""Value of the key `format`; an index with another value is refused."""
BLOCK = 1 << 20
"""Bytes of a block, the part of a file that has one checksum; the last block of a file may be shorter."""
_CHECKSUM = ', "checksum": "'


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
    files = {
        plain_name(name): CheckpointFile(int(row["bytes"]), tuple(int(checksum, 16) for checksum in row["crc32"]))
        for name, row in body["files"].items()
    }
    tensors = {name: _stored(name, row, files) for name, row in body["tensors"].items()}
    return CheckpointIndex(folder, int(body["sequence"]), files, tensors, dict(body["aliases"]), dict(body["extra"]))


def plain_name(name: str) -> str:
    """Return `name` if it is a file name without a path. Raises ValueError if it could lead out of the folder."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise ValueError(f"{name!r} is not the plain name of a file in the folder")
    return name


def _stored(name: str, row: Mapping[str, Any], files: Mapping[str, CheckpointFile]) -> StoredTensor:
    dtype, shape = DTYPES[row["dtype"]], tuple(int(size) for size in row["shape"])
    places = [Rectangle(tuple(map(int, part["offsets"])), tuple(map(int, part["sizes"]))) for part in row["parts"]]
    named = zip(row["parts"], places, strict=True)
    parts = tuple(StoredRectangle(part["file"], str(part["entry"]), place) for part, place in named)
    if any(part.file not in files for part in parts):
        raise ValueError(f"{name!r} has a part in a file that the index does not list")
    whole = Rectangle((0,) * len(shape), shape)
    inside = all(part.rectangle.overlap(whole) == part.rectangle for part in parts)
    numel = sum(part.rectangle.numel for part in parts)
    if not inside or min(shape, default=0) < 0 or numel != math.prod(shape):
        raise ValueError(f"the parts of {name!r} do not make up a tensor of shape {shape}: they have {numel} elements")
    return StoredTensor(dtype, shape, parts)


def _sizes(index: CheckpointIndex) -> Iterator[Damage]:
    """Yield the damage of each file that is missing, or has another size than was written."""
    for name, file in index.files.items():
        path = index.folder / name
        try:
            found = "" if (size := path.stat().st_size) == file.size else f"{size} bytes"
        except OSError as error:
            found = error.strerror or str(error)
        if found:
            tensors = tuple(key for key, row in index.tensors.items() if any(part.file == name for part in row.parts))
            yield Damage(str(path), f"a file of {file.size} bytes", found, tensors)

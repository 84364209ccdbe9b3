"""Write (`header`) and read (`read_header`) headers of safetensors files; convert dtypes (`DTYPES`, `dtype_name`).

The format (https://huggingface.co/docs/safetensors) is simple: eight bytes with the length of the header, a JSON table
of dtypes, shapes and offsets, then the bytes of the tensors. The safetensors library writes all tensors of a file at
once, which doubles the memory of a rank's share. And it does not return the offset of a tensor in the file. So headers
are written here, before any tensor is there. For files that are read, the library only checks the header."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError

LENGTH_BYTES = 8
"""Bytes at the start of a file that hold the length of its header. The length is a multiple of this number."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file. Its bytes are `start` to `stop` (excluded), counted from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


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


DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
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
)
"""Dtypes by their names in the format."""
_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the format. Raises ValueError for a dtype that the format does not have."""
    if dtype not in _NAMES:
        raise ValueError(f"safetensors has no {dtype}; it has {', '.join(str(known) for known in _NAMES)}")
    return _NAMES[dtype]

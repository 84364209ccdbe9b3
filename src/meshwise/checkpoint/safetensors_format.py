"""The safetensors format: dtypes by name (`DTYPES`, `dtype_name`), headers written (`header`) and read (`read_header`).

The safetensors library writes all tensors at once, which doubles the memory of a rank's share, and its reader trusts
the file. The format (https://huggingface.co/docs/safetensors) is simple: eight bytes with the length of the header, a
JSON table of dtypes, shapes and offsets, then the bytes. Here the header is written before any tensor is at hand, and
every entry is checked against the size of the file.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError

LENGTH_BYTES = 8
_LARGEST = 100 << 20
"""The largest header that the format's own library reads."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: `start` and `stop` are bytes from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes its elements take."""
        return math.prod(self.shape) * self.dtype.itemsize


def header(specs: Iterable[TensorSpec], *, metadata: Mapping[str, str]) -> bytes:
    """Return the bytes that come before the first tensor; the tensors follow in the order of `specs`, without gaps.

    Raises ValueError for a dtype that the format does not have.
    """
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
    """Return the tensors of a safetensors file, by name.

    Raises DamageError for a file that is not safetensors or too small for its entries; OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or not 2 <= length <= min(_LARGEST, size - LENGTH_BYTES):
            raise _damaged(path, f"a header of at most {max(0, size - LENGTH_BYTES)} bytes", f"a length of {length}")
        text = file.read(length)
    try:
        table = json.loads(text)
        table.pop("__metadata__", None)
        return {name: _entry(name, row, LENGTH_BYTES + length, size) for name, row in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "a safetensors header", str(error)) from error


def _entry(name: str, row: Mapping[str, Any], base: int, size: int) -> TensorEntry:
    """Return one row of a header. Raises ValueError, KeyError or TypeError when it cannot be so."""
    dtype = DTYPES[row["dtype"]]
    shape = tuple(int(length) for length in row["shape"])
    start, stop = (base + int(offset) for offset in row["data_offsets"])
    if any(length < 0 for length in shape) or not base <= start <= stop <= size:
        raise ValueError(f"{name!r} of shape {shape} at bytes {start} to {stop} of a file of {size}")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} of shape {shape} and {dtype} in {stop - start} bytes")
    return TensorEntry(name, dtype, shape, start, stop)


def _damaged(path: Path, expected: str, found: str) -> DamageError:
    return DamageError([Damage(str(path), expected, found)])


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

_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the safetensors format. Raises ValueError for one that it does not have."""
    if dtype not in _NAMES:
        raise ValueError(f"safetensors has no {dtype}; it has {', '.join(str(known) for known in _NAMES)}")
    return _NAMES[dtype]

"""The header of a safetensors file, written and read by ourselves.

The library's own writer takes all tensors at once, which doubles the memory for a rank's share. Its reader maps a file
and trusts it. The format is simple (https://huggingface.co/docs/safetensors): the length of the header, eight bytes; a
JSON table of dtypes, shapes and places; the bytes. Here the header is written before any tensor is available. A header
that is read is compared with the size of the file before it is used.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError
from meshwise.checkpoint.safetensors_dtypes import DTYPES, dtype_name

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

    Raises DamageError when the file is not one, or says things that its size does not allow; OSError.
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

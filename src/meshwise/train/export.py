"""Full parameters and buffers to a safetensors file, one at a time.

The library's own writer takes all tensors at once, which is the whole model in the memory of one rank. The format is a
length, a JSON table of offsets and the bytes (https://huggingface.co/docs/safetensors), and the parameter table knows
every shape and type beforehand; so the header is written first and each parameter goes to the file as it arrives. The
writing rank holds one full parameter and its copy (under zero=3: one gathered unit) besides its own state.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from meshwise.data_parallel.holdings import buffers
from meshwise.trainer import Trainer

_TYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_parameters(trainer: Trainer, *, path: Path | None, metadata: Mapping[str, str]) -> None:
    """Write every parameter and persistent buffer under its own name; a tied one once, under its first name.

    Every rank calls it, those that do not write with no path. The file is renamed into place when complete; `metadata`
    is kept in its header. Raises OSError.
    """
    if path is None:
        for _ in trainer.full_parameters():
            pass
        return
    partial = path.with_name(f"{path.name}.partial")
    rows = [(row.name, row.shape, row.dtype) for row in trainer.table.rows]
    kept = [(held.name, held.tensor) for held in buffers(trainer.model)]
    rows += [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in kept]
    with partial.open("wb") as file:
        file.write(_header(rows, metadata))
        for row, (name, tensor) in zip(rows, itertools.chain(trainer.full_parameters(), kept), strict=True):
            assert row == (name, tuple(tensor.shape), tensor.dtype)
            file.write(_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in order. Of a copy: memory that numpy has seen can no longer be resized, and under zero=3 the
    parameter's own memory is.
    """
    copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copy.reshape(-1).view(torch.uint8).numpy().data


def _header(rows: Sequence[tuple[str, tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]) -> bytes:
    """The length and the table, padded with spaces to a multiple of 8 bytes."""
    table: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, shape, dtype in rows:
        end = offset + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

"""Write full parameters and buffers to a safetensors file, one at a time.

The safetensors library takes all tensors at once: the whole model in the memory of one rank. The parameter table knows
all shapes and dtypes, so the header is written first, then each parameter as it is gathered. The writing rank holds one
full parameter and its copy (under zero=3 one gathered unit) besides its own state.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import torch

from meshwise.base.atomic_file import write_whole
from meshwise.checkpoint.safetensors_format import TensorSpec, header
from meshwise.data_parallel.stored_slices import buffers
from meshwise.engine.trainer import Trainer


def write_parameters(trainer: Trainer, *, path: Path | None, metadata: Mapping[str, str]) -> None:
    """Write every parameter and persistent buffer under its own name; a tied one once, under its first name.

    Every rank calls it; ranks that do not write pass None as path. The file appears whole or not at all. `metadata`
    goes into its header. Raises OSError.
    """
    own = [held.name for held in buffers(trainer.modules)]
    persistent = {name for names in trainer.world.exchange(own) for name in names}
    persistent_buffers = [(name, value) for name, value in trainer.full_buffers() if name in persistent]
    if path is None:
        for _ in trainer.full_parameters():
            pass
        return
    specs = [TensorSpec(row.name, row.dtype, row.shape) for row in trainer.table.rows]
    specs += [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in persistent_buffers]

    def write(place: Path) -> None:
        with place.open("wb") as file:
            file.write(header(specs, metadata=metadata))
            for spec, (name, tensor) in zip(
                specs, itertools.chain(trainer.full_parameters(), persistent_buffers), strict=True
            ):
                assert spec == TensorSpec(name, tensor.dtype, tuple(tensor.shape))
                file.write(_bytes(tensor))

    write_whole(path, write=write, aside=path.with_name(f"{path.name}.partial"))


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a copy: numpy forbids resizing memory it has seen, and zero=3 resizes the parameter's."""
    copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copy.reshape(-1).view(torch.uint8).numpy().data

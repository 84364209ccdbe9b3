"""Read and write folders of torch's distributed checkpoint (DCP), one tensor at a time: `read_dcp`, `write_dcp`.

    .metadata        shape, dtype and chunks of each tensor: a pickle, which can execute code
    __0_0.distcp …   the chunks of each rank

`torch.distributed.checkpoint.save` needs all tensors in memory, and its `load` all that are asked for. Here each tensor
is loaded by a call of its own, and saved through a planner that makes a tensor when it is written."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

METADATA = ".metadata"
"""File that makes a folder one of DCP."""


def _dcp() -> Any:
    """Return torch.distributed.checkpoint, without its warning that there is one process. It imports FSDP."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - takes a second

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    return dcp


@dataclass(frozen=True)
class DcpEntry:
    """A stored value. `shape`, `dtype`: of a tensor; None for another value."""

    reader: Any
    key: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    @property
    def meta(self) -> Tensor:
        """Meta tensor of the shape and dtype."""
        return torch.empty(self.shape or (), dtype=self.dtype, device="meta")

    def read(self) -> Any:
        """Return the value."""
        state = {self.key: None if self.shape is None else torch.empty(self.shape, dtype=self.dtype)}
        _dcp().load(state, storage_reader=self.reader, no_dist=True)
        return state[self.key]


def read_dcp(folder: Path) -> dict[tuple[str, ...], DcpEntry]:
    """Return the entries of a folder by their keys in the saved tree; indices of lists are digits.

    It reads `.metadata` alone. Raises OSError."""
    dcp = _dcp()

    class Reader(dcp.FileSystemReader):  # type: ignore[name-defined, misc]
        @cache  # noqa: B019 - it lives as long as the entries
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return super().read_metadata()

    reader = Reader(folder)
    metadata = reader.read_metadata()
    paths = metadata.planner_data or {}
    found: dict[tuple[str, ...], DcpEntry] = {}
    for key, stored in metadata.state_dict_metadata.items():
        more = (tuple(stored.size), stored.properties.dtype) if isinstance(stored, dcp.TensorStorageMetadata) else ()
        found[tuple(map(str, paths.get(key, (key,))))] = DcpEntry(reader, key, *more)
    return found


def write_dcp(folder: Path, *, tree: Mapping[str, Any], read: Callable[[Tensor], Tensor]) -> None:
    """Write a tree of values to a new folder, as `torch.distributed.checkpoint.save(tree)` does on one process.

    Tensors in the tree are meta tensors; `read` returns the elements of one, when it is written. Raises OSError."""
    dcp = _dcp()

    class Planner(dcp.DefaultSavePlanner):  # type: ignore[name-defined, misc]
        def lookup_object(self, index: Any) -> Any:
            value = super().lookup_object(index)
            return read(value) if isinstance(value, Tensor) else value

    dcp.save(dict(tree), storage_writer=dcp.FileSystemWriter(folder), planner=Planner(), no_dist=True)

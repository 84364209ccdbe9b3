"""Read and write folders of torch's distributed checkpoint (DCP), one tensor at a time: `read_dcp`, `write_dcp`.

    .metadata        shape, dtype and chunks of each tensor: a pickle, which can execute code
    __0_0.distcp …   the chunks of each rank

`torch.distributed.checkpoint.save` and `load` need all tensors of their argument in memory at once. Here each tensor is
loaded by a separate `load`, and `save` gets a planner that reads each tensor just before it is written."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

METADATA = ".metadata"
"""Name of the file that every DCP folder has."""


def _dcp() -> Any:
    """Return torch.distributed.checkpoint, without its warning that there is one process. It imports FSDP."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415 - takes a second

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    return dcp


@dataclass(frozen=True)
class DcpEntry:
    """A stored value, not read yet: its `key` for torch's `reader`. `shape`, `dtype`: None if it is no tensor."""

    reader: Any
    key: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def read(self) -> Any:
        """Read the value from the folder and return it: a tensor on the CPU, or another object."""
        state = {self.key: None if self.shape is None else torch.empty(self.shape, dtype=self.dtype)}
        _dcp().load(state, storage_reader=self.reader, no_dist=True)
        return state[self.key]


def read_dcp(folder: Path) -> dict[tuple[str, ...], DcpEntry]:
    """Return the entries of a folder by their paths in the saved tree, such as ("layers", "0", "weight").

    Reads only the file `.metadata`. Raises OSError."""
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

    Tensors in the tree are meta tensors; `read` returns the values of one, just before its write. Raises OSError."""
    dcp = _dcp()

    class Planner(dcp.DefaultSavePlanner):  # type: ignore[name-defined, misc]
        def lookup_object(self, index: Any) -> Any:
            value = super().lookup_object(index)
            return read(value) if isinstance(value, Tensor) else value

    dcp.save(dict(tree), storage_writer=dcp.FileSystemWriter(folder), planner=Planner(), no_dist=True)

"""Find how many bytes of memory a rank may still allocate on its device.

On a GPU this is the free memory of the device (`comm/api/streams.py`). On a CPU it is the smallest of these limits:

    | of the process   the limits that `ulimit` sets
    | of the host      an equal part for each rank of the free memory of the machine, and of each cgroup of the process
    |                  (a container, a batch job, a service)

A cgroup counts the page cache as memory in use. As in container runtimes, its inactive pages count as free here."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwise.comm.api.streams import streams_of

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class _Version:
    """Names of one cgroup version: folder, file of the limit, file of the memory in use, key of inactive page cache."""

    folder: str
    most: str
    now: str
    idle: str


_FIRST = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Version("", "memory.max", "memory.current", "inactive_file")


def room_left(device: torch.device, *, ranks: int = 1, used: int = 0) -> int:
    """Return the bytes that a rank of this host may allocate; each of the other ranks already uses `used` bytes.

    On a GPU the blocks that torch keeps for reuse are released first; `ranks` and `used` are ignored."""
    if (memory := streams_of(device).memory) is not None:
        return memory.free()
    if not _OWN_GROUPS.exists():  # a system without /proc reports its total memory only
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    machine = kernel_counts(Path("/proc/meminfo"))["MemAvailable"]
    shared = min([machine, *cgroup_bytes_left(_OWN_GROUPS.read_text(), root=_GROUPS)])
    return min([(shared + (ranks - 1) * used) // ranks, *_left_by_limits()])


def cgroup_bytes_left(own: str, *, root: Path) -> Iterator[int]:
    """Yield the bytes left in each of the process's cgroups that has a limit, and in their parents under `root`.

    `own`: the text of /proc/self/cgroup. In a container its paths may be paths of the host. A folder that does not
    exist is skipped; `root` itself, the container's cgroup, always exists."""
    for line in own.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        version = _FIRST if kinds else _SECOND
        top = root / version.folder
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            most = folder / version.most
            if folder.is_relative_to(top) and most.exists() and (limit := most.read_text().strip()) != "max":
                yield max(0, int(limit) - _used_bytes(folder, version))


def _used_bytes(folder: Path, version: _Version) -> int:
    now = int((folder / version.now).read_text())
    rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return now - next((int(size) for name, size in rows if name == version.idle), 0)


def _left_by_limits() -> Iterator[int]:
    status = kernel_counts(Path("/proc/self/status"))
    for kind, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield max(0, limit - status[used])


def kernel_counts(file: Path) -> dict[str, int]:
    """Return the sizes in a file of /proc (`MemAvailable: 12 kB`), in bytes, by name."""
    rows = (line.split() for line in file.read_text().splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in rows}

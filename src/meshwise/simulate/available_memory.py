"""Find how much memory a rank may still take on its device.

    | own       the limits of its process, as `ulimit` sets them
    | shared    what the machine has left, and what each control group has that the process is in (of a container, a
    |           batch system, a service); the ranks of a host take their parts of that

What a group uses counts files that the kernel keeps in memory while there is room. Page-cache pages that were not used
lately count as free, as container runtimes do.
"""

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
    """File names of one cgroup version, under the folder of all cgroups."""

    folder: str
    most: str
    now: str
    idle: str


_FIRST = _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Version("", "memory.max", "memory.current", "inactive_file")


def room_left(device: torch.device, *, ranks: int = 1, used: int = 0) -> int:
    """Return the bytes that each of the `ranks` of this host may take; every other rank already uses `used` bytes."""
    if (memory := streams_of(device).memory) is not None:
        return memory.free()
    if not _OWN_GROUPS.exists():  # a system without /proc knows what it has, not what is left
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    shared = min([_left_by_the_machine(), *cgroup_bytes_left(_OWN_GROUPS.read_text(), root=_GROUPS)])
    return min([(shared + (ranks - 1) * used) // ranks, *_left_by_limits()])


def cgroup_bytes_left(own: str, *, root: Path) -> Iterator[int]:
    """Yield the bytes that are left in each control group with a limit: the groups in `own` and their parents.

    `own`: the text of /proc/self/cgroup. Inside a container its paths may be the host's; a path that is not
    under `root` is skipped, and its parents there are the container's.
    """
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


def _left_by_the_machine() -> int:
    return kernel_counts(Path("/proc/meminfo"))["MemAvailable"]


def _left_by_limits() -> Iterator[int]:
    status = kernel_counts(Path("/proc/self/status"))
    for kind, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield max(0, limit - status[used])


def kernel_counts(file: Path) -> dict[str, int]:
    """Return the sizes that a file of /proc lists, in bytes, by name."""
    rows = (line.split() for line in file.read_text().splitlines() if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in rows}

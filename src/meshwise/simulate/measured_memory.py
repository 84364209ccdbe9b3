"""Measure memory: how much a rank may still allocate, and how much a few real steps of a plan use.

On a GPU `room_left` returns the free memory of the device (`comm/api/streams.py`). On a CPU it returns the smallest of
these limits:

    | of the process   the limits that `ulimit` sets
    | of the host      an equal part for each rank of the free memory of the machine, and of each cgroup of the process
    |                  (a container, a batch job, a service)

A cgroup counts the page cache as memory in use. As in container runtimes, its inactive pages count as free here.

`measure` runs a plan and returns each rank's peak memory and step times, to compare with a prediction."""

import os
import resource
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch.nn import functional

from meshwise.comm.api.streams import streams_of
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.plan import Plan
from meshwise.simulate.rehearsal import RehearsalSubject

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


_STATUS = Path("/proc/self/status")
_ROLLUP = Path("/proc/self/smaps_rollup")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

MALLOC = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
)
"""Environment variables for ranks whose memory is measured on a CPU. With them, glibc returns freed tensors to the
system at once, so that resident memory is the memory of live tensors."""


@dataclass(frozen=True)
class MeasuredRank:
    """Measured peak memory and step times of one rank."""

    index: int
    """Index of the rank along pp."""
    peak: int
    """Peak bytes in the steps after the first, minus the bytes before the plan was applied. On a GPU: bytes that torch
    allocated. On a CPU: resident private memory plus the rank's part of shared memory."""
    seconds: tuple[float, ...]
    """Seconds of each step, the first included."""

    @property
    def step(self) -> float:
        """Median seconds of the steps after the first."""
        return statistics.median(self.seconds[1:])


def measure(world: World, *, subject: RehearsalSubject, plan: Plan, steps: int = 3) -> list[MeasuredRank]:
    """Run a plan for `steps` steps and return the measurements of all ranks. Every rank calls it.

    After 3 steps a run has allocated all memory that it keeps. CPU ranks must have been started with the environment
    `MALLOC`. Raises OSError without Linux's files in /proc."""
    _warm_up(world.device)
    before = _resident_bytes(world.device)
    trainer = parallelize(
        subject.model,
        plan,
        loss=subject.loss,
        optimizer=subject.optimizer,
        world=world,
        options=subject.options,
        **subject.arguments,
    )
    seconds = [trainer.step(subject.batch).seconds]
    _forget_peak(world.device)
    seconds += [trainer.step(subject.batch).seconds for _ in range(steps - 1)]
    own = MeasuredRank(trainer.world.group("pp").index, _peak(world.device) - before, tuple(seconds))
    trainer.close()
    return list(world.exchange(own))


def _resident_bytes(device: torch.device) -> int:
    """Return the bytes that this rank uses now."""
    if (memory := streams_of(device).memory) is not None:
        return memory.held
    return kernel_counts(_STATUS)["RssAnon"] + kernel_counts(_ROLLUP)["Pss_Shmem"]


def _forget_peak(device: torch.device) -> None:
    if (memory := streams_of(device).memory) is not None:
        memory.forget_peak()
    else:
        _RESET.write_text(_RESET_PEAK)


def _peak(device: torch.device) -> int:
    """Return the peak bytes of this rank since `_forget_peak`.

    Linux counts the peak of all resident memory. Files and shared memory hardly change from step to step, so they are
    subtracted; then the rank's part of shared memory is added."""
    if (memory := streams_of(device).memory) is not None:
        return memory.peak
    status = kernel_counts(_STATUS)
    return status["VmHWM"] - status["RssFile"] - status["RssShmem"] + kernel_counts(_ROLLUP)["Pss_Shmem"]


def _warm_up(device: torch.device) -> None:
    """Use the libraries once, because they allocate at first use, on a CPU for example buffers for matrices."""
    torch.ones(4096, 384, device=device) @ torch.ones(384, 8192, device=device)
    x = torch.ones(64, 64, device=device, requires_grad=True)
    y = functional.layer_norm(functional.gelu(x @ x), (64,)).view(1, 1, 64, 64)
    functional.scaled_dot_product_attention(y, y, y, is_causal=True).sum().backward()
    optimizer = torch.optim.AdamW([x], fused=True)
    optimizer.step()

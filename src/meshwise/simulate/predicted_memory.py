"""Predict each rank's memory by category for every action of a step, and find the cheapest plan that fits.

The first step allocates the optimizer's state. The peak is the peak of the second step, which starts with that state.

docs/memory.md shows what `memory_advice` and `needs` print, and what `room_left` counts ("Out of memory")."""

import math
import os
import re
import resource
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from meshwise.base import tensor_tree as tree
from meshwise.base.text_format import align_columns
from meshwise.comm.api.streams import gpu_count, streams_of
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import Options, parallelize
from meshwise.model.forward import Loss
from meshwise.optim.build_optimizer import OptimizerClass
from meshwise.plan import Plan, PlanError
from meshwise.simulate.rehearsal import Device, Rehearsal, RehearsalSubject, is_meta_tensor_error, rehearse
from meshwise.simulate.step_tape import Category, MemoryChange, TapeSegment

_OWN_GROUPS = Path("/proc/self/cgroup")

_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Names in cgroups of version 2 and 1: folder, file of the limit, file of the used memory, key of inactive cache."""


def room_left(device: torch.device, *, ranks: int = 1, used: int = 0) -> int:
    """Return the bytes that a rank of this host may allocate; each of the other ranks already uses `used` bytes.

    On a GPU the blocks that torch keeps for reuse are released first; `ranks` and `used` are ignored."""
    if (memory := streams_of(device).memory) is not None:
        return memory.free()
    if not _OWN_GROUPS.exists():  # a system without /proc reports its total memory only
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    machine = kernel_counts(Path("/proc/meminfo"))["MemAvailable"]
    shared = min([machine, *cgroup_bytes_left(_OWN_GROUPS.read_text(), root=Path("/sys/fs/cgroup"))])
    return min([(shared + (ranks - 1) * used) // ranks, *_left_by_limits()])


def cgroup_bytes_left(own: str, *, root: Path) -> Iterator[int]:
    """Yield the bytes left in each of the process's cgroups that has a limit, and in their parents under `root`.

    `own`: the text of /proc/self/cgroup. In a container its paths may be paths of the host. A folder that does not
    exist is skipped; `root` itself, the container's cgroup, always exists."""
    for line in own.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        place, limit, used, idle = _VERSIONS[bool(kinds)]
        top = root / place
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            most = folder / limit
            if folder.is_relative_to(top) and most.exists() and (text := most.read_text().strip()) != "max":
                inactive = re.findall(rf"^{idle} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
                yield max(0, int(text) - int((folder / used).read_text()) + sum(map(int, inactive)))


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
    memory = streams_of(world.device).memory
    before = memory.held if memory else kernel_counts(_STATUS)["RssAnon"] + kernel_counts(_ROLLUP)["Pss_Shmem"]
    trainer = parallelize(subject.model, plan, world=world, **subject.training)
    seconds = [trainer.step(subject.batch).seconds]
    if memory:
        memory.reset_peak()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): 5 resets the peak of resident memory, VmHWM
    seconds += [trainer.step(subject.batch).seconds for _ in range(steps - 1)]
    own = MeasuredRank(trainer.world.group("pp").index, _peak(world.device) - before, tuple(seconds))
    trainer.close()
    return list(world.exchange(own))


def _peak(device: torch.device) -> int:
    """Return the peak bytes of this rank since it was reset.

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
    torch.optim.AdamW([x], fused=True).step()


@dataclass(frozen=True)
class ActionMemory:
    """Peak memory of a rank during one action."""

    label: str
    """Activity, such as `2F0` or `update`; "" for the time before the step."""
    before: "_Sizes"
    """Bytes by category when the action begins: on the device, and in the host's memory."""
    more: "_Sizes" = (Counter(), Counter())
    """Bytes by category that the action adds: on the device until its peak, and on the host the largest increase."""

    @cached_property
    def bytes(self) -> int:
        """Bytes on the device at the peak, over all categories."""
        return self.before[0].total() + self.more[0].total()

    @cached_property
    def device(self) -> Mapping[Category, int]:
        """Bytes by category on the device at the peak."""
        return _sum(self.before[0], self.more[0])

    @cached_property
    def host(self) -> Mapping[Category, int]:
        """Largest bytes of each category in the host's memory; empty if the device is a CPU."""
        return _sum(self.before[1], self.more[1])


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank along pp in a step after the first; all its replicas use the same."""

    index: int
    steady: tuple[ActionMemory, ...]
    """Memory before a later step, then the peak of each action of this step."""
    off_device: Mapping[str, int]
    """Bytes of state off the device, by tier: `cpu`, `disk`."""

    @property
    def peak(self) -> ActionMemory:
        """Action in which the rank needs the most memory on its device."""
        return max(self.steady, key=lambda moment: moment.bytes)

    @property
    def rest(self) -> Mapping[Category, int]:
        """Bytes by category on the device between steps."""
        return self.steady[0].device


def memory_of(rehearsal: Rehearsal) -> tuple[RankMemory, ...]:
    """Return the memory of every rank along pp, in order."""
    known: dict[int, tuple[_Sizes, _Sizes]] = {}
    ranks = []
    for index, tape in enumerate(rehearsal.tapes):
        moments: list[ActionMemory] = []
        before: _Sizes = (Counter(), Counter())
        earlier = (tape.build, *tape.first)
        for segment in (*earlier, *rehearsal.steps[index], *tape.agreements):
            if id(segment.entries) not in known:
                known[id(segment.entries)] = _changes(segment, apart=rehearsal.device != "cpu")
            after, most = known[id(segment.entries)]
            moments.append(ActionMemory(str(segment.activity), before, most))
            before = _sum(before[0], after[0]), _sum(before[1], after[1])
        steady = moments[len(earlier) :]
        ranks.append(RankMemory(index, (ActionMemory("", steady[0].before), *steady), tape.off_device))
    return tuple(ranks)


def fullest(ranks: Iterable[RankMemory]) -> RankMemory:
    """Return the rank with the largest peak on its device."""
    return max(ranks, key=lambda rank: rank.peak.bytes)


_Sizes: TypeAlias = tuple[Counter[Category], Counter[Category]]
"""Bytes by category on the device, and in the host's memory."""


def _changes(segment: TapeSegment, *, apart: bool) -> tuple[_Sizes, _Sizes]:
    """Return the memory changes by the end of a segment, and up to the device's peak (on the host, the largest ones).

    `apart`: the host's memory is separate from the device's."""
    device, host, most, most_host = (Counter[Category]() for _ in range(4))
    total = highest = 0
    for entry in segment.entries:
        if isinstance(entry, MemoryChange) and entry.host and apart:
            host[entry.category] += entry.bytes
            most_host |= host
        elif isinstance(entry, MemoryChange):
            device[entry.category] += entry.bytes
            total += entry.bytes
            if total > highest:
                highest, most = total, Counter(device)
    return (device, host), (most, most_host)


def _sum(one: Counter[Category], other: Counter[Category]) -> Counter[Category]:
    """Return the sums of two counts, `one` itself if nothing is added; `+` of counters would drop negative sums."""
    found = Counter(one) if other else one
    found.update(other)
    return found


Table = list[tuple[str, ...]]
"""Rows of cells; the first row has the titles."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def memory_table(ranks: Sequence[RankMemory], *, measured: Sequence[MeasuredRank] = ()) -> Table:
    """Return each rank's peak memory along pp by category; if measured, with the measured peak and the error."""
    categories = [category for category in Category if any(rank.peak.device.get(category) for rank in ranks)]
    hosts = any(moment.host for rank in ranks for moment in rank.steady)
    tiers = [tier for tier in ("cpu", "disk") if any(rank.off_device.get(tier) for rank in ranks)]
    host = ["on the host"] if hosts or "cpu" in tiers else []
    titles = ("pp", *categories, "peak", "during", *host, *(["on disk"] if "disk" in tiers else []))
    rows: Table = [(*titles, "measured", "error") if measured else titles]
    for rank in ranks:
        peak = rank.peak
        cells = [str(rank.index), *(size_text(peak.device.get(category, 0)) for category in categories)]
        cells += [size_text(peak.bytes), peak.label]
        if host:
            most = max(sum(moment.host.values()) for moment in rank.steady)
            cells.append(size_text(most + rank.off_device.get("cpu", 0)))
        if "disk" in tiers:
            cells.append(size_text(rank.off_device.get("disk", 0)))
        if measured:
            most = max(one.peak for one in measured if one.index == rank.index)
            cells += [size_text(most), f"{100 * (peak.bytes / most - 1):+.1f} %"]
        rows.append(tuple(cells))
    return rows


def size_text(size: float) -> str:
    """Return a size in bytes as text with a unit: `4.0 KiB` for 4096."""
    power = 0
    while abs(size) >= 1024 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.0f} {_UNITS[power]}" if power == 0 else f"{size:.1f} {_UNITS[power]}"


CHANGES = (
    "",
    "microbatches=*2",
    "microbatches=*4",
    "recompute=selective",
    "recompute=full",
    "offload=optimizer:cpu",
    "recompute=full offload=optimizer:cpu",
    "offload=optimizer:disk",
    "offload=optimizer:disk,gradients:disk",
    "recompute=full offload=optimizer:disk,gradients:disk",
    "zero=3 offload=optimizer:disk,gradients:disk,params:disk",
    "zero=3 recompute=full offload=optimizer:disk,gradients:disk,params:disk",
)
"""Changes of a plan that save memory, the cheapest in time first: smaller micro-batches, recomputation, offload to the
host, offload to disk; `*2` multiplies. Each is tried with every `zero` from the plan's value to 3, cheapest first."""


class ShortageError(MemoryError):
    """Out-of-memory error of a rank. `used`: bytes that the rank used, by category, as in `Trainer.memory`."""

    def __init__(self, message: str, *, used: Mapping[str, int]) -> None:
        super().__init__(message)
        self.used = used

    def __reduce__(self) -> "tuple[partial[ShortageError], tuple[Any, ...]]":
        """Return how to unpickle this error together with `used`; the default would pickle only the message."""
        return partial(ShortageError, used=self.used), self.args


@dataclass(frozen=True)
class MemoryAdvice:
    """Memory that a plan needs on the fullest rank, the memory it may use, and the cheapest plan that fits.

    predicted       bytes by category; empty if nothing could be predicted
    used            bytes by category at the time of the error; empty if nothing has run
    room            bytes that the rank may use
    fitting         cheapest plan that fits: `plan` itself if it fits, None if no plan was found
    fitting_needs   bytes that `fitting` needs
    unpredictable   reason why the memory of this model cannot be predicted; empty if it can"""

    plan: Plan
    predicted: Mapping[str, int]
    used: Mapping[str, int]
    room: int
    fitting: Plan | None = None
    fitting_needs: int = 0
    unpredictable: str = ""

    def __str__(self) -> str:
        cell = lambda sizes, kind: size_text(sizes[kind]) if kind in sizes else ""  # noqa: E731
        kinds = dict.fromkeys([*self.predicted, *self.used])
        rows = [("", "predicted", "when it failed" if self.used else "")]
        rows += [(kind, cell(self.predicted, kind), cell(self.used, kind)) for kind in kinds]
        rows += [("in all", size_text(sum(self.predicted.values())), "")] if self.predicted else []
        rows += [("room", size_text(self.room), "")]
        lines = [f"  {line}" for line in align_columns(rows).split("\n")]
        advice = (
            "no change of the plan makes this model fit here; try more ranks, a smaller batch or, for state on disk, "
            "smaller staging buffers (swap.megabytes of a job, SwapConfig(buffer=…) in Options)"
        )
        if self.unpredictable:
            advice = f"the memory of plans for this model cannot be predicted without values: {self.unpredictable}"
        if self.fitting == self.plan:
            advice = "it fits"
        elif self.fitting is not None:
            advice = f"the cheapest change that fits: '{self.fitting}' ({size_text(self.fitting_needs)})"
        return "\n".join([f"the plan '{self.plan}' on a rank:", *lines, advice])


class MemoryNeeds:
    """Predicted bytes by category on the fullest rank, for any plan of a training. Each plan is rehearsed once."""

    def __init__(self, subject: RehearsalSubject, *, ranks: int, shared: bool = False) -> None:
        """`shared`: all ranks are processes of one host. If this host has no GPU, they share memory."""
        self.device: Device = "cuda" if gpu_count() else "cpu"
        self.rows = tree.row_count(subject.batch)
        self._subject, self._ranks, self._shared = subject, ranks, shared and self.device == "cpu"
        self._known: dict[Plan, Mapping[str, int]] = {}

    def of(self, plan: Plan) -> Mapping[str, int]:
        """Return the bytes by category on the fullest rank. Raises the errors of `rehearse`."""
        if plan not in self._known:
            found = rehearse(self._subject, plan=plan, ranks=self._ranks, device=self.device, shared=self._shared)
            peak = fullest(memory_of(found)).peak
            self._known[plan] = {str(category): size for category, size in peak.device.items()}
        return self._known[plan]

    def total(self, plan: Plan) -> float:
        """Return the total bytes on the fullest rank; infinity for a plan that cannot be rehearsed with this model."""
        try:
            return sum(self.of(plan).values())
        except (ValueError, RuntimeError):
            return math.inf


def memory_advice(needs: MemoryNeeds, *, plan: Plan, room: int, used: Mapping[str, int]) -> MemoryAdvice:
    """Return the predicted memory of `plan`, and the cheapest plan that fits into `room`.

    `used`: bytes by category when `plan` ran out of memory; if empty, `plan` itself may be the plan that fits."""
    try:
        predicted = needs.of(plan)
    except (ValueError, RuntimeError) as error:
        return MemoryAdvice(plan, {}, used, room, unpredictable=str(error))
    if not used and needs.total(plan) <= room:
        return MemoryAdvice(plan, predicted, used, room, plan, int(needs.total(plan)))
    for change in CHANGES:
        candidates = list(_changed(plan, change, needs=needs))
        # The last candidate needs (almost) the least memory. If it does not fit, the others are not rehearsed.
        if candidates and needs.total(candidates[-1]) <= room:
            candidate = next(one for one in candidates if needs.total(one) <= room)
            return MemoryAdvice(plan, predicted, used, room, candidate, int(needs.total(candidate)))
    return MemoryAdvice(plan, predicted, used, room)


def needs(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan | str,
    *,
    loss: Loss,
    batch: Any,
    optimizer: OptimizerClass = torch.optim.AdamW,
    options: Options | None = None,
    **optimizer_arguments: Any,
) -> MemoryAdvice:
    """Return the memory that a plan needs on each rank of this host; if too much, also the cheapest plan that fits.

    Print the result. Call this function with the arguments of `parallelize` and a typical global batch, before
    `parallelize` changes the model. It allocates no tensors of the model's size. Raises PlanError if the plan does not
    fit the model, ValueError for `dp=auto`."""
    plan = Plan.of(plan)
    ranks = plan.mesh().size
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    subject = RehearsalSubject(model, loss, batch, optimizer, optimizer_arguments, options or Options())
    found = MemoryNeeds(subject, ranks=ranks, shared=here == ranks)
    room = room_left(torch.device(found.device), ranks=here)
    try:
        found.of(plan)
    except RuntimeError as error:
        if not is_meta_tensor_error(error):
            raise
    return memory_advice(found, plan=plan, room=room, used={})


def _changed(plan: Plan, change: str, *, needs: MemoryNeeds) -> Iterator[Plan]:
    """Yield the plan with a change of `CHANGES` and each `zero` from the plan's value to 3, in ascending order."""
    if needs.device == "cpu" and "optimizer:cpu" in change:
        return  # all tensors are in the host's memory already
    words = dict(word.split("=", 1) for word in change.split())
    for zero in range(plan.zero, 4 if plan.dp != 1 or "zero" in words else plan.zero + 1):
        if words.get("zero", str(zero)) != str(zero):
            continue
        changes: dict[str, str | int] = {**words, "zero": zero}
        if times := words.get("microbatches"):
            changes["microbatches"] = plan.microbatches * int(times.removeprefix("*"))
        try:
            candidate = Plan.from_toml({**plan.to_toml(), **changes})
        except PlanError:
            continue
        parts = candidate.microbatches * candidate.row_parts
        if candidate != plan and (not times or parts <= needs.rows):
            yield candidate

"""The answer to an error of memory: what was predicted, what there was, and the cheapest plan that fits.

A process that runs out of memory is told how many bytes the last allocation wanted, which says nothing about what
filled the rest. Here the plan is rehearsed, and beside it, from the cheapest change to the dearest, the plans that
keep less, until one fits the room there is.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwise.plan import Plan, PlanError
from meshwise.simulate.memory import fullest, memory_of
from meshwise.simulate.rehearsal import Device, Subject, rehearse
from meshwise.simulate.tables import by_category, text

CHANGES = (
    "zero=1",
    "zero=2",
    "zero=3",
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
"""What makes a plan need less memory, by what it costs in time: first what costs none, then repeated computation, then
copies over a link, then a disk."""

_CGROUP = Path("/sys/fs/cgroup")
_GROUPS = (
    (_CGROUP / "memory.max", _CGROUP / "memory.current"),
    (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
)


class ShortageError(RuntimeError):
    """A rank has no memory left. `held`: what it had by then, in bytes, as `Trainer.memory` tells it."""

    def __init__(self, message: str, *, held: Mapping[str, int]) -> None:
        super().__init__(message)
        self.held = held


@dataclass(frozen=True)
class Shortage:
    """What a plan needs of a rank, what the rank had, and a plan that needs less. All sizes are in bytes."""

    plan: Plan
    predicted: Mapping[str, int]
    held: Mapping[str, int]
    room: int
    fitting: Plan | None
    fitting_needs: int

    def __str__(self) -> str:
        told = lambda sizes, kind: text(sizes[kind]) if kind in sizes else ""  # noqa: E731
        kinds = dict.fromkeys([*self.predicted, *self.held])
        rows = [("", "predicted", "when it failed")]
        rows += [(kind, told(self.predicted, kind), told(self.held, kind)) for kind in kinds]
        rows += [("in all", text(sum(self.predicted.values())), ""), ("room", text(self.room), "")]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}".rstrip() for row in rows]
        advice = "no change of the plan makes this model fit here: more ranks or smaller micro-batches may"
        if self.fitting is not None:
            advice = f"the cheapest change that fits: '{self.fitting}' ({text(self.fitting_needs)})"
        return "\n".join([f"the plan '{self.plan}' on a rank:", *lines, advice])


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on the device or in the process."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | ShortageError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def shortage(subject: Subject, *, plan: Plan, ranks: int, room: int, held: Mapping[str, int]) -> Shortage:
    """Rehearse `plan`, which has run out of memory, and what is cheapest of those that fit `room` bytes of a rank."""
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"

    def needs(candidate: Plan) -> Mapping[str, int]:
        return by_category([fullest(memory_of(rehearse(subject, plan=candidate, ranks=ranks, device=device)))])

    predicted = needs(plan)
    for candidate in _cheaper(plan, device=device):
        try:
            total = sum(needs(candidate).values())
        except (ValueError, RuntimeError):
            continue  # this model cannot be trained under it
        if total <= room:
            return Shortage(plan, predicted, held, room, candidate, total)
    return Shortage(plan, predicted, held, room, None, 0)


def room_left(device: torch.device) -> int:
    """Bytes that this process may still take of its device: what its limits, its group and the machine leave it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_left())


def _cheaper(plan: Plan, *, device: str) -> Iterator[Plan]:
    """Plans that need less memory than this one, the cheapest first."""
    for change in CHANGES:
        changes: dict[str, str | int] = {}
        for word in change.split():
            key, _, value = word.partition("=")
            changes[key] = int(value) if value.isdecimal() else value
        if int(changes.get("zero", plan.zero)) < plan.zero or (plan.dp == 1 and set(changes) == {"zero"}):
            continue
        if device == "cpu" and "optimizer:cpu" in change:
            continue  # there is no other memory to go to
        try:
            candidate = Plan.from_toml({**plan.to_toml(), **changes})
        except PlanError:
            continue
        if candidate != plan:
            yield candidate


def _left() -> Iterator[int]:
    """What each limit leaves, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    yield _kilobytes(meminfo["MemAvailable"])
    for kind, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield max(0, limit - _kilobytes(status[used]))
    for most, now in _GROUPS:
        if most.exists() and (told := most.read_text().strip()) != "max":
            yield max(0, int(told) - int(now.read_text()))


def _kilobytes(told: str) -> int:
    return int(told.split(maxsplit=1)[0]) * 1024

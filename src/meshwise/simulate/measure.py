"""What a rank really takes: its time, and its memory as the device or the operating system tells of it."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch.nn import functional

from meshwise.comm.world import World
from meshwise.parallelize import parallelize
from meshwise.plan import Plan
from meshwise.simulate.rehearsal import Subject

STEPS = 3
"""After so many, everything that a run keeps is there."""

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

MALLOC = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
)
"""Environment in which glibc gives freed tensors back to the system at once, so that what the system counts is what
is alive. Ranks whose memory is measured on a CPU are started in it."""


@dataclass(frozen=True)
class Measured:
    """One rank of a plan that was run."""

    index: int
    """Along pp."""

    peak: int
    """Bytes, more than before the plan was applied: on a GPU as torch allocated them, on a CPU resident in memory."""

    seconds: tuple[float, ...]
    """Of each step."""

    @property
    def step(self) -> float:
        """The median of the steps after the first."""
        return statistics.median(self.seconds[1:])


def measure(world: World, *, subject: Subject, plan: Plan, steps: int = STEPS) -> list[Measured]:
    """Run a plan for a few steps on the ranks that there are. Every rank calls it and gets what all have measured.

    On a CPU the ranks should not share memory (gloo), and live in the environment `MALLOC`. Raises OSError where the
    system does not tell a process's peak.
    """
    _wake(world.device)
    with _peak(world.device) as peak:
        trainer = parallelize(
            subject.model,
            plan,
            loss=subject.loss,
            optimizer=subject.optimizer,
            world=world,
            options=subject.options,
            **subject.arguments,
        )
        seconds = tuple(trainer.step(subject.batch).seconds for _ in range(steps))
        own = Measured(trainer.world.group("pp").index, peak(), seconds)
        trainer.close()
    return list(world.exchange(own))


@contextlib.contextmanager
def _peak(device: torch.device) -> Iterator[Callable[[], int]]:
    """Inside, a function that tells how much memory was added at most."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
    else:
        _RESET.write_text(_RESET_PEAK)
        before = _resident("VmHWM")
        yield lambda: _resident("VmHWM") - before


def _resident(name: str) -> int:
    """Bytes, from the kernel's own account of this process."""
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{_STATUS} does not tell {name}")
    return int(found[1]) * 1024


def _wake(device: torch.device) -> None:
    """Let libraries take what they take when they are used for the first time."""
    x = torch.ones(64, 64, device=device, requires_grad=True)
    y = functional.layer_norm(functional.gelu(x @ x), (64,)).view(1, 1, 64, 64)
    functional.scaled_dot_product_attention(y, y, y, is_causal=True).sum().backward()
    optimizer = torch.optim.AdamW([x], fused=True)
    optimizer.step()

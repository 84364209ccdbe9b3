"""Run a plan for a few real steps and measure each rank's time and memory, to compare with a prediction."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch.nn import functional

from meshwise.comm.api.streams import streams_of
from meshwise.comm.api.world import World
from meshwise.engine.parallelize import parallelize
from meshwise.plan import Plan
from meshwise.simulate.available_memory import kernel_counts
from meshwise.simulate.rehearsal_subject import RehearsalSubject

STEPS = 3
"""Default number of steps; after them a run has allocated all memory that it keeps."""

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


def measure(world: World, *, subject: RehearsalSubject, plan: Plan, steps: int = STEPS) -> list[MeasuredRank]:
    """Run a plan for `steps` steps and return the measurements of all ranks. Every rank calls it.

    CPU ranks must have been started with the environment `MALLOC`. Raises OSError without Linux's files in /proc."""
    _warm_up(world.device)
    before = _used_bytes(world.device)
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


def _used_bytes(device: torch.device) -> int:
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

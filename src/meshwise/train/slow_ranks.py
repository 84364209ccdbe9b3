"""Which rank the others wait for.

In a step that ends with a collective every rank takes as long as the slowest, so the time of a step tells nothing. What
tells is how long a rank was busy: the time of its step, less what it waited in collectives (comm's journal knows).
Every so many steps the ranks exchange these times, one small collective, and a rank that was slower than the others by
a clear margin is named, with the steps.

On CUDA a collective is waited for by the device and not by the rank, whose journal then shows next to no waiting; a
slow GPU is not told apart from the others this way, nor is a slow host whose GPU hides it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from meshwise.comm.api.world import World
from meshwise.train.events import Slow

WINDOW = 20
"""Steps between two looks at the times."""
_FACTOR = 2.0
_LEAST_SECONDS = 0.05


class BusyTimer:
    """How long this rank is busy: the time between `start` and `stop`, less what it waits for others."""

    def __init__(self, world: World) -> None:
        self._journal = world.journal
        self._began = self._waited = 0.0

    def start(self) -> None:
        """Begin."""
        self._began, self._waited = time.monotonic(), self._journal.waited

    def stop(self) -> float:
        """Return seconds since `start`, less those of waiting."""
        return time.monotonic() - self._began - (self._journal.waited - self._waited)


class RankPace:
    """The busy time of this rank's steps, and those of all ranks compared."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps: list[int] = []
        self._seconds: list[float] = []

    def note(self, step: int, *, seconds: float) -> list[Slow]:
        """Keep what a step took; when it is time, return what the times of all ranks show. Every rank calls it."""
        self._steps.append(step)
        self._seconds.append(seconds)
        return self.compare() if len(self._steps) == WINDOW else []

    def compare(self) -> list[Slow]:
        """Return the slow ranks by the times since the last call; every rank calls it. Every rank calls it."""
        world, steps = self._world, self._steps
        own = torch.tensor(self._seconds, dtype=torch.float64, device=world.device)
        self._steps, self._seconds = [], []
        if world.size == 1 or not steps:
            return []
        times = own.new_empty(world.size * len(steps))
        world.all_gather(own, into=times, axes=world.mesh.names).wait()
        return list(slow_ranks(steps, times=times.view(world.size, len(steps)).tolist()))


def slow_ranks(steps: list[int], *, times: list[list[float]]) -> Iterator[Slow]:
    """Yield the ranks that were slower than the median of the others, twofold and by at least 50 ms.

    times: seconds by rank and step.
    """
    for rank, own in enumerate(times):
        found = []
        for number, step in enumerate(steps):
            others = statistics.median(row[number] for other, row in enumerate(times) if other != rank)
            if own[number] > max(_FACTOR * others, others + _LEAST_SECONDS):
                found.append((step, own[number], others))
        if found:
            named, seconds, others_took = zip(*found, strict=True)
            yield Slow(steps[-1], rank, list(named), statistics.mean(seconds), statistics.mean(others_took))

"""Find ranks that the others wait for: `BusyTimer` measures a rank, `RankPace` compares all ranks.

In a step that ends with a collective every rank takes as long as the slowest. So the busy time is compared: the time of
the step less the time in collectives, from comm's flight recorder. Every 20 steps the ranks exchange these times in one
small collective. A rank is slow if it was busy for more than twice the others' median and 50 ms longer.

On CUDA the device waits for a collective, not the rank: slow GPUs are not found.
"""

import statistics
import time
from collections.abc import Iterator

import torch

from meshwise.comm.api.world import World
from meshwise.train.run_events import Slow

WINDOW = 20
"""Steps between two comparisons."""
_FACTOR = 2.0
_LEAST_SECONDS = 0.05


class BusyTimer:
    """A timer of the seconds between `start` and `stop` in which this rank does not wait for others."""

    def __init__(self, world: World) -> None:
        self._flight_recorder = world.flight_recorder
        self._began = self._waited = 0.0

    def start(self) -> None:
        """Start the timer."""
        self._began, self._waited = time.monotonic(), self._flight_recorder.waited

    def stop(self) -> float:
        """Return seconds since `start`, less the seconds it waited."""
        return time.monotonic() - self._began - (self._flight_recorder.waited - self._waited)


class RankPace:
    """The busy times of this rank's steps, and their comparison between all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps: list[int] = []
        self._seconds: list[float] = []

    def note(self, step: int, *, seconds: float) -> list[Slow]:
        """Record the busy time of a step; after 20 steps, return the slow ranks. Every rank calls it."""
        self._steps.append(step)
        self._seconds.append(seconds)
        return self.compare() if len(self._steps) == WINDOW else []

    def compare(self) -> list[Slow]:
        """Return the slow ranks by the times since the last call. Every rank calls it."""
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

"""Find slow ranks, which make other ranks wait: `BusyTimer` times this rank, `RankPace` compares all ranks.

Collectives make every rank's step as long as the slowest rank's. So the ranks compare their busy time: the
time of the step without waits in collectives, which comm's flight recorder measures. They exchange these times every
20 steps. A rank is slow in a step if its busy time is more than twice the other ranks' median, and 50 ms above it.

Slow GPUs are not found, because on CUDA not the process, but the device waits for a collective."""

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
    """Timer of the seconds between `start` and `stop` in which this rank does not wait for other ranks."""

    def __init__(self, world: World) -> None:
        self._flight_recorder = world.flight_recorder
        self._began = self._waited = 0.0

    def start(self) -> None:
        """Start the timer."""
        self._began, self._waited = time.monotonic(), self._flight_recorder.waited

    def stop(self) -> float:
        """Return the seconds since `start`, without the seconds in which this rank waited in collectives."""
        return time.monotonic() - self._began - (self._flight_recorder.waited - self._waited)


class RankPace:
    """Collects the busy times of this rank's steps; every 20 steps, it compares them with the other ranks' times."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps: list[int] = []
        self._seconds: list[float] = []

    def note(self, step: int, *, seconds: float) -> list[Slow]:
        """Record the busy seconds of a step; return the slow ranks in every 20th call. Every rank calls it."""
        self._steps.append(step)
        self._seconds.append(seconds)
        return self.compare() if len(self._steps) == WINDOW else []

    def compare(self) -> list[Slow]:
        """Return the slow ranks by the busy times recorded since the last comparison. Every rank calls it."""
        world, steps = self._world, self._steps
        own = torch.tensor(self._seconds, dtype=torch.float64, device=world.device)
        self._steps, self._seconds = [], []
        if world.size == 1 or not steps:
            return []
        times = own.new_empty(world.size * len(steps))
        world.all_gather(own, into=times, axes=world.mesh.names).wait()
        return list(slow_ranks(steps, times=times.view(world.size, len(steps)).tolist()))


def slow_ranks(steps: list[int], *, times: list[list[float]]) -> Iterator[Slow]:
    """Yield one event for each rank that was slow in a step. `times[rank][i]`: busy seconds in step `steps[i]`."""
    for rank, own in enumerate(times):
        found = []
        for number, step in enumerate(steps):
            others = statistics.median(row[number] for other, row in enumerate(times) if other != rank)
            if own[number] > max(_FACTOR * others, others + _LEAST_SECONDS):
                found.append((step, own[number], others))
        if found:
            named, seconds, others_took = zip(*found, strict=True)
            yield Slow(steps[-1], rank, list(named), statistics.mean(seconds), statistics.mean(others_took))

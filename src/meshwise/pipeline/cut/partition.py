"""Partition a row of steps into contiguous stages whose largest load is as small as possible.

Most pipelines round a running sum, which is off by as much as the largest piece. The embedding and the head of a
language model are large pieces. The rows are short, so the best cut is found exactly.
"""

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshwise.pipeline.schedules.schedule_clock import StepClock


class CutError(ValueError):
    """Error for a model that cannot be cut as requested."""


@dataclass(frozen=True)
class CutSteps:
    """Steps to partition: one entry per step, in running order."""

    loads: Sequence[Sequence[float]]
    """Load of each step, for each stage; a stage that holds more micro-batches counts more activations."""
    solid: Sequence[bool]
    """True for steps that can be a stage on their own: those with parameters."""
    crossing: Sequence[float]
    """Bytes that a cut before each step sends."""
    before: Sequence[float] = ()
    """Load that a cut before each step adds to the stage that ends there; empty for none."""
    after: Sequence[float] = ()
    """Load that it adds to the stage that begins there."""

    def largest(self, bounds: Sequence[int]) -> float:
        """Return the load of the largest of the stages between these bounds."""
        return max(_Table(self).loads(bounds))

    def merged(self, places: Sequence[int]) -> "CutSteps":
        """Return steps that can only be cut at these places; the first place is 0."""
        parts = list(pairwise((*places, len(self.solid))))
        return CutSteps(
            loads=[[sum(row[start:stop]) for start, stop in parts] for row in self.loads],
            solid=[any(self.solid[start:stop]) for start, stop in parts],
            **{
                name: [each[place] for place in places] if each else ()
                for name, each in (("crossing", self.crossing), ("before", self.before), ("after", self.after))
            },
        )


def worthwhile(steps: CutSteps, *, apart: float, always: Collection[int], never: Collection[int]) -> list[int]:
    """Return the places worth trying: all of `always`, none of `never`, and others at least `apart` in load.

    Of places that are nearer to each other, the one where least crosses is taken.
    """
    sums = [0.0, *accumulate(max(steps.loads, key=sum))]
    kept = sorted(always)
    taken = sorted(sums[place] for place in kept)
    others = [place for place in range(len(steps.solid)) if place not in never and place not in always]
    for place in sorted(others, key=lambda place: steps.crossing[place]):
        at = bisect_left(taken, sums[place])
        if all(abs(near - sums[place]) >= apart for near in taken[max(0, at - 1) : at + 1]):
            kept.append(place)
            insort(taken, sums[place])
    return sorted(kept)


def divide(steps: CutSteps, *, slack: float = 0.0) -> tuple[int, ...]:
    """Return the bounds of the stages: stage k is steps[bounds[k]:bounds[k + 1]].

    The largest load is the least possible, or up to `slack` (a fraction of it) more where less is then sent in all.
    Among equals, the loads are the most even. By dynamic programming over (stage, end), O(stages · steps²).

    Raises CutError when there are fewer solid steps than stages, saying how many stages fit.
    """
    stages, count = len(steps.loads), len(steps.solid)
    if stages > sum(steps.solid):
        raise CutError(
            f"{stages} stages do not fit: the model has {sum(steps.solid)} pieces that can stand alone, so at most "
            f"pp·virtual_stages={sum(steps.solid)}"
        )
    table = _Table(steps)
    everything = [[math.inf] * (count + 1) for _ in range(stages + 1)]
    everything[0][0] = 0.0
    for stage, end in itertools.product(range(stages), range(1, count + 1)):
        least = math.inf
        for start in range(end - 1, -1, -1):
            if table.alone(stage, start, end) >= least:
                break
            least = min(least, max(everything[stage][start], table.load(stage, start, end)))
        everything[stage + 1][end] = least
    limit = everything[stages][count] * (1 + slack) * (1 + 1e-12)
    return _cheapest(table, limit)


def quicken(
    steps: CutSteps, *, bounds: tuple[int, ...], clock: StepClock, tries: int = 10_000
) -> tuple[tuple[int, ...], float]:
    """Return bounds from which no move makes a step of the schedule shorter, and the time of that step.

    The search makes moves from `bounds` until none helps or `tries` were timed; moves with the smallest largest stage
    come first. Moving a step from stage i to stage j moves every bound between them by one. Where steps are of several
    kinds, an equal step may be some steps away.
    """
    table = _Table(steps)
    best = clock(loads=table.loads(bounds), crossing=table.sent(bounds), limit=math.inf)
    moved = True
    while moved:
        moved = False
        loads = {other: table.loads(other) for other in _moves(bounds, table.count)}
        for other in sorted(loads, key=lambda other: max(loads[other])):
            if tries == 0 or max(loads[other]) == math.inf:
                break
            taken = clock(loads=loads[other], crossing=table.sent(other), limit=best)
            tries -= taken < math.inf
            if taken < best * (1 - 1e-6):
                best, bounds, moved = taken, other, True
                break
    return bounds, best


REACH = 4
"""Most steps by which a move moves one bound."""


def _moves(bounds: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Yield the bounds after each move: one bound by up to REACH steps, or several neighbouring ones by one."""
    for first, last in itertools.combinations_with_replacement(range(1, len(bounds) - 1), 2):
        reach = REACH if first == last else 1
        for by in (by for by in range(-reach, reach + 1) if by):
            moved = (*bounds[:first], *(bound + by for bound in bounds[first : last + 1]), *bounds[last + 1 :])
            if all(start < stop for start, stop in pairwise(moved)) and moved[-1] == count:
                yield moved


def _cheapest(table: "_Table", limit: float) -> tuple[int, ...]:
    """Return the bounds with the fewest bytes sent, then the least sum of squared loads; no load exceeds `limit`."""
    best: list[dict[int, tuple[tuple[float, float], tuple[int, ...]]]] = [{0: ((0.0, 0.0), (0,))}]
    for stage in range(table.stages):
        ends: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
        for start, ((sent, squares), bounds) in best[-1].items():
            for end in range(start + 1, table.count + 1):
                if table.alone(stage, start, end) > limit:
                    break
                load = table.load(stage, start, end)
                if load <= limit:
                    price = (sent + (table.crossing[start] if start else 0.0), squares + load**2)
                    if end not in ends or price < ends[end][0]:
                        ends[end] = (price, (*bounds, end))
        best.append(ends)
    return best[-1][table.count][1]


class _Table:
    """Loads of ranges of steps, as differences of running sums."""

    def __init__(self, steps: CutSteps) -> None:
        self.stages, self.count, self.crossing = len(steps.loads), len(steps.solid), steps.crossing
        self._sums = [[0.0, *accumulate(row)] for row in steps.loads]
        self._solid = [0, *accumulate(steps.solid)]
        nothing = [0.0] * (self.count + 1)
        self._before = [*steps.before, 0.0] if steps.before else nothing
        self._after = [*steps.after, 0.0] if steps.after else nothing

    def loads(self, bounds: Sequence[int]) -> list[float]:
        """Return the loads of the stages between these bounds."""
        return [self.load(stage, start, end) for stage, (start, end) in enumerate(pairwise(bounds))]

    def sent(self, bounds: Sequence[int]) -> list[float]:
        """Return the bytes that the stages between these bounds send."""
        return [self.crossing[bound] for bound in bounds[1:-1]]

    def load(self, stage: int, start: int, end: int) -> float:
        """Return the load of a stage of these steps; infinite if none of them has parameters."""
        if self._solid[end] == self._solid[start]:
            return math.inf
        return self.alone(stage, start, end) + self._after[start] + self._before[end]

    def alone(self, stage: int, start: int, end: int) -> float:
        """Return the load without the cost of the cuts at both ends; it grows with the steps."""
        return self._sums[stage][end] - self._sums[stage][start]

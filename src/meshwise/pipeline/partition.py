"""Where to cut a row of steps into stages: contiguous, and the largest stage as small as can be.

Rounding a running sum, which is what most pipelines do, is off by as much as the largest piece, and the embedding and
the head of a language model are large pieces. The rows are short, so the best cut is found exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class CutError(ValueError):
    """A model that cannot be cut as it was asked for."""


@dataclass(frozen=True)
class Steps:
    """What is cut: one entry per step, in the order in which they run."""

    loads: Sequence[Sequence[float]]
    """Per stage, what each step adds to it; a stage may weigh steps differently (it holds more micro-batches)."""

    solid: Sequence[bool]
    """Which steps could be a stage on their own: those with parameters."""

    crossing: Sequence[float]
    """What would be sent, if the row were cut before this step."""


def divide(steps: Steps, *, slack: float = 0.0) -> tuple[int, ...]:
    """The bounds of the stages: stage k is steps[bounds[k]:bounds[k + 1]].

    The largest load is the least possible, or up to `slack` (a part of it) more where less is then sent in all; among
    equals, the loads are the most even. By dynamic programming over (stage, end), O(stages · steps²).

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
        everything[stage + 1][end] = min(
            (max(everything[stage][start], table.load(stage, start, end)) for start in range(end)), default=math.inf
        )
    limit = everything[stages][count] * (1 + slack) * (1 + 1e-12)
    return _cheapest(table, limit)


class StepSeconds(Protocol):
    """How long a step takes when the stages have these loads; it may be infinite when that is `limit` or more."""

    def __call__(self, *, loads: Sequence[float], limit: float) -> float:
        """In the unit of the loads."""


def quicken(steps: Steps, *, bounds: tuple[int, ...], seconds: StepSeconds) -> tuple[int, ...]:
    """Bounds from which no move of one step, from one stage to another, makes a step of the schedule shorter.

    From the given ones the best move is made until there is none. Moving a step from stage i to stage j moves every
    bound between them by one.
    """
    table = _Table(steps)
    best = seconds(loads=table.loads(bounds), limit=math.inf)
    while True:
        found = bounds
        for moved in _moves(bounds, table.count):
            loads = table.loads(moved)
            taken = seconds(loads=loads, limit=best) if max(loads) < math.inf else math.inf
            if taken < best * (1 - 1e-9):
                best, found = taken, moved
        if found == bounds:
            return bounds
        bounds = found


def _moves(bounds: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Every run of inner bounds moved by one, where that leaves no stage empty."""
    for first, last in itertools.combinations_with_replacement(range(1, len(bounds) - 1), 2):
        for by in (-1, 1):
            moved = (*bounds[:first], *(bound + by for bound in bounds[first : last + 1]), *bounds[last + 1 :])
            if all(start < stop for start, stop in itertools.pairwise(moved)) and moved[-1] == count:
                yield moved


def _cheapest(table: _Table, limit: float) -> tuple[int, ...]:
    """The bounds with the least sent, then the least sum of squared loads, when no stage may exceed `limit`."""
    best: list[dict[int, tuple[tuple[float, float], tuple[int, ...]]]] = [{0: ((0.0, 0.0), (0,))}]
    for stage in range(table.stages):
        ends: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
        for start, ((sent, squares), bounds) in best[-1].items():
            for end in range(start + 1, table.count + 1):
                load = table.load(stage, start, end)
                if load <= limit:
                    price = (sent + (table.crossing[start] if start else 0.0), squares + load**2)
                    if end not in ends or price < ends[end][0]:
                        ends[end] = (price, (*bounds, end))
        best.append(ends)
    return best[-1][table.count][1]


class _Table:
    """Loads of ranges of steps, by differences of running sums."""

    def __init__(self, steps: Steps) -> None:
        self.stages, self.count, self.crossing = len(steps.loads), len(steps.solid), steps.crossing
        self._sums = [[0.0, *itertools.accumulate(row)] for row in steps.loads]
        self._solid = [0, *itertools.accumulate(steps.solid)]

    def loads(self, bounds: Sequence[int]) -> list[float]:
        """What the stages between these bounds would carry."""
        return [self.load(stage, start, end) for stage, (start, end) in enumerate(itertools.pairwise(bounds))]

    def load(self, stage: int, start: int, end: int) -> float:
        """What a stage of these steps would carry; infinite when none of them could be a stage."""
        if self._solid[end] == self._solid[start]:
            return math.inf
        return self._sums[stage][end] - self._sums[stage][start]

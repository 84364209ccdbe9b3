"""Partition a list of items into contiguous stages whose largest load is as small as possible.

An item is one call of a piece of the model. Most pipelines round a running sum instead. Its error is up to the largest
item, and a language model's embedding and head are large. The lists are short, so the best bounds are found exactly."""

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
class PartitionItems:
    """Items to partition into stages: every list has one entry per item, in running order."""

    loads: Sequence[Sequence[float]]
    """One list for each stage: the load of each item on this stage. Early stages hold more activations."""
    solid: Sequence[bool]
    """True for items with parameters; each stage needs at least one."""
    sent_bytes: Sequence[float]
    """Bytes that are sent per micro-batch if a stage begins at the item."""
    before: Sequence[float] = ()
    """Load that is added to the preceding stage if a stage begins at the item; empty: nothing is added."""
    after: Sequence[float] = ()
    """Load that is added to the stage that begins at the item; empty: nothing is added."""

    def largest(self, bounds: Sequence[int]) -> float:
        """Return the load of the largest stage; stage k has the items from bounds[k] to bounds[k + 1]."""
        return max(_Table(self).loads(bounds))

    def merged(self, places: Sequence[int]) -> "PartitionItems":
        """Merge all items between two neighbouring `places` into one item each; the first place is 0."""
        parts = list(pairwise((*places, len(self.solid))))
        return PartitionItems(
            loads=[[sum(row[start:stop]) for start, stop in parts] for row in self.loads],
            solid=[any(self.solid[start:stop]) for start, stop in parts],
            **{
                name: [each[place] for place in places] if each else ()
                for name, each in (("sent_bytes", self.sent_bytes), ("before", self.before), ("after", self.after))
            },
        )


def places_to_try(items: PartitionItems, *, apart: float, always: Collection[int], never: Collection[int]) -> list[int]:
    """Return the items at which it is worth a try to begin a stage: all of `always`, none of `never`, and others.

    The others are at least `apart` in load from each other and from `always`; items with few sent bytes come first."""
    sums = [0.0, *accumulate(max(items.loads, key=sum))]
    kept = sorted(always)
    taken = sorted(sums[place] for place in kept)
    others = [place for place in range(len(items.solid)) if place not in never and place not in always]
    for place in sorted(others, key=lambda place: items.sent_bytes[place]):
        at = bisect_left(taken, sums[place])
        if all(abs(near - sums[place]) >= apart for near in taken[max(0, at - 1) : at + 1]):
            kept.append(place)
            insort(taken, sums[place])
    return sorted(kept)


def divide(items: PartitionItems, *, slack: float = 0.0) -> tuple[int, ...]:
    """Return the bounds of the stages: stage k has items[bounds[k]:bounds[k + 1]].

    Take all bounds whose largest load exceeds the least possible by at most the fraction `slack`. Of these, return the
    bounds that send the fewest bytes; if several do, the most even. Dynamic programming, O(stages · items²).

    Raises CutError, with the number of stages that fit, when there are fewer solid items than stages."""
    stages, count = len(items.loads), len(items.solid)
    if stages > sum(items.solid):
        raise CutError(
            f"{stages} stages do not fit: the model has {sum(items.solid)} pieces that can stand alone, so at most "
            f"pp·virtual_stages={sum(items.solid)}"
        )
    table = _Table(items)
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


def improve_bounds(
    items: PartitionItems, *, bounds: tuple[int, ...], clock: StepClock, tries: int = 10_000
) -> tuple[tuple[int, ...], float]:
    """Improve bounds by a local search; return bounds that no move improves, and the time of a step with them.

    The search ends when no move shortens the training step, or when `tries` moves were timed. Moves whose largest stage
    is smallest come first. One kind of move shifts several neighbouring bounds by one, so one item moves from stage i
    to stage j. The other shifts one bound by up to REACH items, past items of other kinds to an equal item."""
    table = _Table(items)
    best = clock(loads=table.loads(bounds), sent_bytes=table.sent(bounds), limit=math.inf)
    moved = True
    while moved:
        moved = False
        loads = {other: table.loads(other) for other in _moves(bounds, table.count)}
        for other in sorted(loads, key=lambda other: max(loads[other])):
            if tries == 0 or max(loads[other]) == math.inf:
                break
            taken = clock(loads=loads[other], sent_bytes=table.sent(other), limit=best)
            tries -= taken < math.inf
            if taken < best * (1 - 1e-6):
                best, bounds, moved = taken, other, True
                break
    return bounds, best


REACH = 4
"""Most items by which a move of `improve_bounds` shifts a single bound."""


def _moves(bounds: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """Yield the bounds after each move: one bound shifted by up to REACH items, or several neighbours by one."""
    for first, last in itertools.combinations_with_replacement(range(1, len(bounds) - 1), 2):
        reach = REACH if first == last else 1
        for by in (by for by in range(-reach, reach + 1) if by):
            moved = (*bounds[:first], *(bound + by for bound in bounds[first : last + 1]), *bounds[last + 1 :])
            if all(start < stop for start, stop in pairwise(moved)) and moved[-1] == count:
                yield moved


def _cheapest(table: "_Table", limit: float) -> tuple[int, ...]:
    """Return the bounds without a load above `limit` that send the fewest bytes; then, with the least squared loads."""
    best: list[dict[int, tuple[tuple[float, float], tuple[int, ...]]]] = [{0: ((0.0, 0.0), (0,))}]
    for stage in range(table.stages):
        ends: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
        for start, ((sent, squares), bounds) in best[-1].items():
            for end in range(start + 1, table.count + 1):
                if table.alone(stage, start, end) > limit:
                    break
                load = table.load(stage, start, end)
                if load <= limit:
                    price = (sent + (table.sent_bytes[start] if start else 0.0), squares + load**2)
                    if end not in ends or price < ends[end][0]:
                        ends[end] = (price, (*bounds, end))
        best.append(ends)
    return best[-1][table.count][1]


class _Table:
    """Loads of ranges of items, as differences of running sums."""

    def __init__(self, items: PartitionItems) -> None:
        self.stages, self.count, self.sent_bytes = len(items.loads), len(items.solid), items.sent_bytes
        self._sums = [[0.0, *accumulate(row)] for row in items.loads]
        self._solid = [0, *accumulate(items.solid)]
        nothing = [0.0] * (self.count + 1)
        self._before = [*items.before, 0.0] if items.before else nothing
        self._after = [*items.after, 0.0] if items.after else nothing

    def loads(self, bounds: Sequence[int]) -> list[float]:
        """Return the loads of the stages between these bounds."""
        return [self.load(stage, start, end) for stage, (start, end) in enumerate(pairwise(bounds))]

    def sent(self, bounds: Sequence[int]) -> list[float]:
        """Return the bytes that each stage except the last sends."""
        return [self.sent_bytes[bound] for bound in bounds[1:-1]]

    def load(self, stage: int, start: int, end: int) -> float:
        """Return the load of stage `stage` with the items from start to end; infinite if no item has parameters."""
        if self._solid[end] == self._solid[start]:
            return math.inf
        return self.alone(stage, start, end) + self._after[start] + self._before[end]

    def alone(self, stage: int, start: int, end: int) -> float:
        """Return the load without the added loads of `before` and `after`; it never falls as the range grows."""
        return self._sums[stage][end] - self._sums[stage][start]

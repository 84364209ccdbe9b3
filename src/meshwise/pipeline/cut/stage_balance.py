"""Choose where stages begin, to make a training step short or the largest stage small.

An item is one call of a piece of the model. `divide` partitions the items into contiguous stages whose largest load is
as small as possible. The lists are short, so the best bounds are found exactly. For the step of a schedule, several
such bounds are compared by its clock.

`balance` tries boundaries between pieces first. A boundary inside a block (`probe_result.inner_modules`) is used if it
gains enough. Of boundaries that are nearly as good, the one that sends the fewest bytes is taken.
`bounds_by_name` returns the boundaries that a user has chosen."""

import difflib
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from torch import nn

from meshwise.pipeline.cut.probe_result import CutError, ProbeResult
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.pipeline.schedules.schedule_table import Schedule, in_flight

STATE_COPIES = 4
"""Memory of a trained parameter, in multiples of its bytes: the parameter, its gradient, two moments of Adam."""

MIN_GAIN = 0.02
"""Least gain (a fraction) for which a boundary inside a block is used; also the `slack` of `divide` in its search."""

FRONT_SLACKS = (0.02, 0.1)
"""Values of `slack` with which `divide` makes the first stages large, for the step of a schedule."""


@dataclass(frozen=True)
class PartitionItems:
    """Items to partition into stages: every list has one entry per item, in running order."""

    loads: Sequence[Sequence[float]]
    """One list for each stage: the load of each item on this stage. Early stages hold more activations."""
    solid: Sequence[bool]
    """True for items with parameters. Each stage needs such an item; each stage after the first begins at one."""
    sent_bytes: Sequence[float]
    """Bytes that are sent per micro-batch if a stage begins at the item."""

    @cached_property
    def _sums(self) -> Sequence[Sequence[float]]:
        """Running sums of `loads`, so that the load of a range is a difference."""
        return [[0.0, *accumulate(row)] for row in self.loads]

    def stage_loads(self, bounds: Sequence[int]) -> list[float]:
        """Return the load of each stage; stage k has the items from bounds[k] to bounds[k + 1]."""
        return [self.load(stage, start=start, end=end) for stage, (start, end) in enumerate(pairwise(bounds))]

    def load(self, stage: int, *, start: int, end: int) -> float:
        """Return the load of stage `stage` with the items from start to end; infinite if these cannot form a stage."""
        fits = self.solid[start] if start else any(self.solid[:end])
        return self.sum(stage, start=start, end=end) if fits else math.inf

    def sum(self, stage: int, *, start: int, end: int) -> float:
        """Return the sum of the loads of the items on a stage; it never falls as the range grows."""
        return self._sums[stage][end] - self._sums[stage][start]


def divide(items: PartitionItems, *, slack: float = 0.0, front: float = 0.0) -> tuple[int, ...]:
    """Return the bounds of the stages: stage k has items[bounds[k]:bounds[k + 1]].

    Take all bounds whose largest load exceeds the least possible by at most the fraction `slack`. Of these, return the
    bounds that send the fewest bytes; if several do, the most even: the least sum of squared loads. In this sum, the
    weight of a stage grows by `front` from the first stage to the last. Dynamic programming, O(stages · items²).

    Raises CutError, with the number of stages that fit, when there are fewer solid items than stages."""
    stages, count = len(items.loads), len(items.solid)
    if stages > (fit := sum(items.solid)):
        raise CutError(
            f"{stages} stages do not fit: the model has {fit} pieces that can stand alone, so at most "
            f"pp·virtual_stages={fit}"
        )
    everything = [[math.inf] * (count + 1) for _ in range(stages + 1)]
    everything[0][0] = 0.0
    for stage, end in itertools.product(range(stages), range(1, count + 1)):
        least = math.inf
        for start in range(end - 1, -1, -1):
            if items.sum(stage, start=start, end=end) >= least:
                break
            least = min(least, max(everything[stage][start], items.load(stage, start=start, end=end)))
        everything[stage + 1][end] = least
    limit = everything[stages][count] * (1 + slack) * (1 + 1e-12)
    return _cheapest(items, limit, front)


def _cheapest(items: PartitionItems, limit: float, front: float) -> tuple[int, ...]:
    """Return the bounds without a load above `limit` that `divide` prefers."""
    best: list[dict[int, tuple[tuple[float, float], tuple[int, ...]]]] = [{0: ((0.0, 0.0), (0,))}]
    count = len(items.solid)
    for stage in range(len(items.loads)):
        ends: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
        weight = 1 + front * stage / len(items.loads)
        for start, ((sent, squares), bounds) in best[-1].items():
            for end in range(start + 1, count + 1):
                if items.sum(stage, start=start, end=end) > limit:
                    break
                load = items.load(stage, start=start, end=end)
                if load <= limit:
                    price = (sent + (items.sent_bytes[start] if start else 0.0), squares + weight * load**2)
                    if end not in ends or price < ends[end][0]:
                        ends[end] = (price, (*bounds, end))
        best.append(ends)
    return best[-1][count][1]


@dataclass(frozen=True)
class StageBounds:
    """Bounds of the stages in the list of a model's calls."""

    seen: ProbeResult
    """Calls of the model's pieces. A block with a stage boundary inside is replaced by the calls of its modules."""
    bounds: tuple[int, ...]
    """Stage k runs `seen.calls[bounds[k]:bounds[k + 1]]`."""
    split_blocks: tuple[str, ...] = ()
    """Keys of the blocks with a stage boundary inside."""


def bounds_by_name(
    seen: ProbeResult, *, at: Sequence[str], stages: int, splittable: Collection[str] = ()
) -> StageBounds:
    """Return the bounds of stages that begin at the keys `at`: pieces, or modules inside the blocks `splittable`.

    Raises CutError for a wrong number of keys, for a key at which no stage can begin, and for keys out of order."""
    if len(at) != stages - 1:
        raise CutError(f"{stages} stages need {stages - 1} names to begin at, not {len(at)}: {', '.join(at)}")
    begins = seen.begins(splittable)
    names = list(begins)[1:]
    for name in at:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
            raise CutError(f"a stage cannot begin at {name!r}; it can at, for example, {', '.join(near)}")
    bounds = [0, *(begins[name] for name in at), len(seen.with_split_blocks(splittable).calls)]
    if bounds != sorted(set(bounds)):
        raise CutError(f"the model runs {', '.join(sorted(at, key=names.index))} in this order, not {', '.join(at)}")
    return _with_needed_splits(seen, splittable, bounds)


def balance(
    model: nn.Module, *, seen: ProbeResult, by: str, stages: int, schedule: Schedule | None, splittable: Collection[str]
) -> StageBounds:
    """Return the best bounds between pieces, or inside the blocks `splittable` if that gains at least MIN_GAIN.

    `by`: quantity to balance, `time`, `params` or `memory`. `schedule`: None balances the loads of the stages, whatever
    their schedule. Raises CutError when fewer than `stages` stages fit."""
    timed = schedule if by == "time" else None
    whole, fine = (
        PartitionItems(
            loads_of(model, seen=row, by=by, stages=stages, schedule=schedule),
            [bool(called.parameters) for called in row.calls],
            row.sent_bytes,
        )
        for row in (seen, seen.with_split_blocks(splittable))
    )
    fits = sum(whole.solid) >= stages
    bounds, price = _best(whole, timed) if fits or not splittable else ((), math.inf)
    if splittable:
        found, finer = _best(fine, timed, slack=MIN_GAIN)
        if finer < price * (1 - MIN_GAIN):
            return _with_needed_splits(seen, splittable, found)
    return StageBounds(seen, bounds)


def _with_needed_splits(seen: ProbeResult, splittable: Collection[str], bounds: Sequence[int]) -> StageBounds:
    """Return `bounds`, which count the calls with all of `splittable` split, with only the needed blocks split."""
    named = {place: name for name, place in reversed(seen.begins(splittable).items())}
    names = [named[bound] for bound in bounds[:-1]]
    needed = [called.key for called in seen.calls if {part.key for part in called.inside[:-1]}.intersection(names)]
    row, begins = seen.with_split_blocks(needed), seen.begins(needed)
    return StageBounds(row, (*(begins[name] for name in names), len(row.calls)), tuple(needed))


def _best(items: PartitionItems, schedule: Schedule | None, *, slack: float = 0.0) -> tuple[tuple[int, ...], float]:
    """Return the best bounds, and the price: the time of the schedule's step; without a schedule, the largest load.

    `slack` is as in `divide`. With a schedule, cuts with large first stages are tried too."""
    even = divide(items, slack=slack)
    if schedule is None:
        return even, max(items.stage_loads(even))
    price = {}
    for bounds in (even, *(divide(items, slack=slack, front=0.3) for slack in FRONT_SLACKS)):
        thirds = [load / 3 for load in items.stage_loads(bounds)]  # F, I and W take a third each
        price[bounds] = clock(schedule, costs=[ActionCost(third, third, third) for third in thirds]).seconds
    found = min(price, key=price.__getitem__)
    return found, price[found]


def loads_of(
    model: nn.Module, *, seen: ProbeResult, by: str, stages: int, schedule: Schedule | None
) -> list[list[float]]:
    """Return a list for each stage: what each call would add to the stage's load (units: `CutRequest.by`)."""
    if by == "time":
        work = [called.cost.work for called in seen.calls]
        return [[*work[:-1], work[-1] + seen.tail]] * stages
    counted = [[model.get_parameter(name) for name in called.parameters] for called in seen.calls]
    if by == "params":
        return [[float(sum(p.numel() for p in called)) for called in counted]] * stages
    states = [float(sum(p.nbytes * (STATE_COPIES if p.requires_grad else 1) for p in called)) for called in counted]
    activations = [called.cost.activations for called in seen.calls]
    counts = (1.0,) * stages if schedule is None else in_flight(schedule)
    return [[state + times * kept for state, kept in zip(states, activations, strict=True)] for times in counts]

"""Choose where stages begin, to make a training step short or the largest stage small.

Boundaries between pieces are tried first. A boundary inside a block (`split_blocks.py`) is used if it gains enough. Its
cost includes the values that are sent there, and the code that runs on both sides."""

import difflib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwise.pipeline.cut.meta_device import has_no_values
from meshwise.pipeline.cut.partition import CutError, PartitionItems, divide, improve_bounds, places_to_try
from meshwise.pipeline.cut.probe import ROUNDS
from meshwise.pipeline.cut.probe_result import ProbeResult
from meshwise.pipeline.cut.profile_module import read_clock
from meshwise.pipeline.schedules.action import Schedule
from meshwise.pipeline.schedules.schedule_clock import StepClock
from meshwise.pipeline.schedules.validate import in_flight

STATE_COPIES = 4
"""Memory of a trained parameter, in multiples of its bytes: the parameter, its gradient, two moments of Adam."""

MIN_GAIN = 0.02
"""Least gain (a fraction) for which a boundary inside a block is used; also the `slack` of `divide` in its search."""

MIN_DISTANCE = 0.02
"""Least load between two boundaries inside blocks that are both tried, as a fraction of a mean stage's load."""

MAX_EVENTS = 4_000_000
"""Most events that `StepClock` computes in the search for the best bounds; this takes some seconds."""

COPIED_BYTES = 2**22
"""Size of the copy that measures how long it takes to send a byte."""

OPERATIONS_PER_BYTE = 10.0
"""Cost of a sent byte, if costs are counted in operations: a CPU computes as many while it copies a byte."""


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
    model: nn.Module,
    *,
    seen: ProbeResult,
    by: str,
    stages: int,
    schedule: Schedule | None,
    splittable: Collection[str],
) -> StageBounds:
    """Return the best bounds between pieces, or inside the blocks `splittable` if that gains at least MIN_GAIN.

    `by`: quantity to balance, `time`, `params` or `memory`. `schedule`: None balances the loads of the stages, whatever
    their schedule. Raises CutError when fewer than `stages` stages fit."""
    clock = None if by != "time" or schedule is None else _clock(model, schedule)
    whole, fine = (
        _Row(_items(row, loads_of(model, seen=row, by=by, stages=stages, schedule=schedule)))
        for row in (seen, seen.with_split_blocks(splittable))
    )
    begins = seen.begins(splittable)
    pieces = [begins[called.key] for called in seen.calls]
    fits = sum(whole.items.solid) >= stages
    bounds, price = whole.best(clock) if fits or not splittable else ((), math.inf)
    if splittable:
        inner = fine.fewer(stages, always=pieces, never=seen.ends(splittable))
        found, finer = inner.best(clock, also=[(*pieces, len(fine.places))[bound] for bound in bounds], slack=MIN_GAIN)
        if finer < price * (1 - MIN_GAIN):
            return _with_needed_splits(seen, splittable, found)
    return StageBounds(seen, bounds)


def _with_needed_splits(seen: ProbeResult, splittable: Collection[str], bounds: Sequence[int]) -> StageBounds:
    """Convert bounds for the case that all of `splittable` are split: split only the blocks with a boundary inside."""
    named = {place: name for name, place in reversed(seen.begins(splittable).items())}
    names = [named[bound] for bound in bounds[:-1]]
    needed = [called.key for called in seen.calls if {part.key for part in called.inside[:-1]}.intersection(names)]
    row, begins = seen.with_split_blocks(needed), seen.begins(needed)
    return StageBounds(row, (*(begins[name] for name in names), len(row.calls)), tuple(needed))


class _Row:
    """Calls in running order with their loads, and the places at which a stage may begin."""

    def __init__(self, items: PartitionItems, places: Sequence[int] | None = None) -> None:
        self.places = range(len(items.solid)) if places is None else places
        self.items = items if places is None else items.merged(places)
        self._all = items

    def fewer(self, stages: int, *, always: Collection[int], never: Collection[int] = ()) -> "_Row":
        """Return the calls with fewer places: those worth a try or, if these are too few, all except `never`."""
        apart = MIN_DISTANCE * sum(self._all.loads[0]) / stages
        row = _Row(self._all, places_to_try(self._all, apart=apart, always=always, never=never))
        if sum(row.items.solid) >= stages:
            return row
        return _Row(self._all, [place for place in self.places if place not in never])

    def best(
        self, clock: StepClock | None, *, also: Sequence[int] = (), slack: float = 0.0
    ) -> tuple[tuple[int, ...], float]:
        """Return the best bounds among all calls, and the price: the step's time; without a clock, the largest load.

        `slack` is as in `divide`. With a clock, a search starts from the bounds of `divide`, and another from `also`.
        """
        even = divide(self.items, slack=slack)
        if clock is None:
            return self.places_of(even), self.items.largest(even)
        inner = (*self.places, len(self._all.solid))
        starts = [even, *([tuple(map(inner.index, also))] if also else [])]
        tries = MAX_EVENTS // len(clock)
        found = [improve_bounds(self.items, bounds=start, clock=clock, tries=tries) for start in starts]
        bounds, price = min(found, key=lambda one: one[1])
        return self.places_of(bounds), price

    def places_of(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """Convert bounds among the places to bounds among all calls."""
        return tuple((*self.places, len(self._all.solid))[bound] for bound in bounds)


def _items(seen: ProbeResult, loads: Sequence[Sequence[float]]) -> PartitionItems:
    """Return the load of each call, and the cost of a stage boundary before it (0 if no time was measured)."""
    solid, cost = [bool(called.parameters) for called in seen.calls], [called.cost for called in seen.calls]
    return PartitionItems(loads, solid, seen.sent_bytes, [one.between for one in cost], [one.earlier for one in cost])


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


def _clock(model: nn.Module, schedule: Schedule) -> StepClock:
    """Return the clock that times a step of the schedule."""
    byte = OPERATIONS_PER_BYTE if has_no_values(model) else _seconds_to_copy_byte(next(model.parameters()).device)
    return StepClock(schedule, seconds_per_byte=byte)


def _seconds_to_copy_byte(device: torch.device) -> float:
    """Return the seconds that copying one byte takes."""
    some = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    least = math.inf
    for _ in range(ROUNDS):
        begin = read_clock(cuda=some.is_cuda)
        some.clone()
        least = min(least, read_clock(cuda=some.is_cuda) - begin)
    return least / COPIED_BYTES

"""Choose where stages begin, so that a step of the schedule is short or the largest stage is small.

Whole pieces are tried first. Blocks (`block_entry.py`) are opened where a boundary inside helps enough; the values that
cross it and the computation on both sides are counted.
"""

import difflib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwise.pipeline.cut.meta_values import has_no_values
from meshwise.pipeline.cut.partition import CutError, CutSteps, divide, quicken, worthwhile
from meshwise.pipeline.cut.probe import ROUNDS
from meshwise.pipeline.cut.probe_result import ProbeResult
from meshwise.pipeline.cut.profile_module import read_clock
from meshwise.pipeline.schedules.action import Schedule
from meshwise.pipeline.schedules.schedule_clock import StepClock
from meshwise.pipeline.schedules.validate import in_flight

STATE_COPIES = 4
"""Bytes of a trained parameter, in multiples of itself: the parameter, its gradient, two moments of Adam."""

MIN_GAIN = 0.02
"""Gain, as a fraction, from which on blocks are opened; up to as much is given up to send less."""

MIN_DISTANCE = 0.02
"""Distance of two places to cut at inside of blocks, as a fraction of a mean stage; of nearer ones, one is tried."""

MAX_EVENTS = 4_000_000
"""Limit of clock events in the search for the best bounds: some seconds."""

COPIED_BYTES = 2**22
"""Bytes that are copied to measure the cost of a byte that crosses."""

OPERATIONS_PER_BYTE = 10.0
"""Cost of a byte that crosses where operations are counted: a CPU computes so many while it copies one."""


@dataclass(frozen=True)
class BalanceAim:
    """Quantity to balance."""

    by: str
    """`time`, `params` or `memory`."""
    stages: int
    """Number of stages."""
    schedule: Schedule | None
    """Schedule that they will run."""


@dataclass(frozen=True)
class BalancedSteps:
    """Steps of a model with the bounds of stages between them."""

    seen: ProbeResult
    """The steps; blocks with a boundary inside are opened."""
    bounds: tuple[int, ...]
    """Stage k runs `seen.steps[bounds[k]:bounds[k + 1]]`."""
    opened: tuple[str, ...] = ()
    """Keys of the opened blocks."""


def bounds_by_name(seen: ProbeResult, *, at: Sequence[str], stages: int, opens: Collection[str] = ()) -> BalancedSteps:
    """Return the stages that begin at the steps named `at`: pieces, or modules inside of the blocks `opens`.

    Raises CutError for a wrong number of names, for a name that is no place to begin at, and for names out of order.
    """
    if len(at) != stages - 1:
        raise CutError(f"{stages} stages need {stages - 1} names to begin at, not {len(at)}: {', '.join(at)}")
    begins = seen.begins(opens)
    names = list(begins)[1:]
    for name in at:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
            raise CutError(f"a stage cannot begin at {name!r}; it can at, for example, {', '.join(near)}")
    bounds = [0, *(begins[name] for name in at), len(seen.opened(opens).steps)]
    if bounds != sorted(set(bounds)):
        raise CutError(f"the model runs {', '.join(sorted(at, key=names.index))} in this order, not {', '.join(at)}")
    return _opened(seen, opens, bounds)


def balance(model: nn.Module, *, seen: ProbeResult, aim: BalanceAim, opens: Collection[str]) -> BalancedSteps:
    """Return the best bounds between whole pieces, or inside of the blocks `opens` where that gains enough.

    Raises CutError when fewer stages fit.
    """
    clock = _clock(model, aim)
    whole, fine = (_Row(_steps(model, row, aim)) for row in (seen, seen.opened(opens)))
    begins = seen.begins(opens)
    pieces = [begins[step.key] for step in seen.steps]
    fits = sum(whole.steps.solid) >= aim.stages
    bounds, price = whole.best(clock) if fits or not opens else ((), math.inf)
    if opens:
        inner = fine.fewer(aim, always=pieces, never=seen.ends(opens))
        found, finer = inner.best(clock, also=[(*pieces, len(fine.places))[bound] for bound in bounds], slack=MIN_GAIN)
        if finer < price * (1 - MIN_GAIN):
            return _opened(seen, opens, found)
    return BalancedSteps(seen, bounds)


def _opened(seen: ProbeResult, opens: Collection[str], bounds: Sequence[int]) -> BalancedSteps:
    """Return the steps with only the needed blocks opened; `bounds` count the steps with all of `opens` opened."""
    named = {place: name for name, place in reversed(seen.begins(opens).items())}
    names = [named[bound] for bound in bounds[:-1]]
    needed = [step.key for step in seen.steps if {part.key for part in step.inside[:-1]}.intersection(names)]
    row, begins = seen.opened(needed), seen.begins(needed)
    return BalancedSteps(row, (*(begins[name] for name in names), len(row.steps)), tuple(needed))


class _Row:
    """Steps, and the places at which they may be cut."""

    def __init__(self, steps: CutSteps, places: Sequence[int] | None = None) -> None:
        self.places = range(len(steps.solid)) if places is None else places
        self.steps = steps if places is None else steps.merged(places)
        self._all = steps

    def fewer(self, aim: BalanceAim, *, always: Collection[int], never: Collection[int] = ()) -> "_Row":
        """Return the steps with only the places worth trying, or with all but `never` if too few are left."""
        apart = MIN_DISTANCE * sum(self._all.loads[0]) / aim.stages
        row = _Row(self._all, worthwhile(self._all, apart=apart, always=always, never=never))
        if sum(row.steps.solid) >= aim.stages:
            return row
        return _Row(self._all, [place for place in self.places if place not in never])

    def best(
        self, clock: StepClock | None, *, also: Sequence[int] = (), slack: float = 0.0
    ) -> tuple[tuple[int, ...], float]:
        """Return the best bounds, and the step's time or, without a clock, the largest load.

        The largest load may be up to `slack` larger than the least possible if less is then sent. With a clock, the
        search starts from these bounds and from `also`.
        """
        even = divide(self.steps, slack=slack)
        if clock is None:
            return self.places_of(even), self.steps.largest(even)
        inner = (*self.places, len(self._all.solid))
        starts = [even, *([tuple(map(inner.index, also))] if also else [])]
        tries = MAX_EVENTS // len(clock)
        found = [quicken(self.steps, bounds=start, clock=clock, tries=tries) for start in starts]
        bounds, price = min(found, key=lambda one: one[1])
        return self.places_of(bounds), price

    def places_of(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """Return bounds among all steps."""
        return tuple((*self.places, len(self._all.solid))[bound] for bound in bounds)


def _steps(model: nn.Module, seen: ProbeResult, aim: BalanceAim) -> CutSteps:
    """Return the load of each step, and the cost of a cut before it."""
    solid = [bool(step.parameters) for step in seen.steps]
    loads = loads_of(model, seen=seen, aim=aim)
    if aim.by != "time":
        return CutSteps(loads, solid, seen.sent)
    cost = [step.cost for step in seen.steps]
    return CutSteps(loads, solid, seen.sent, [one.between for one in cost], [one.earlier for one in cost])


def loads_of(model: nn.Module, *, seen: ProbeResult, aim: BalanceAim) -> list[list[float]]:
    """Return the load of each step, for each stage."""
    if aim.by == "time":
        work = [step.cost.work for step in seen.steps]
        return [[*work[:-1], work[-1] + seen.tail]] * aim.stages
    counted = [[model.get_parameter(name) for name in step.parameters] for step in seen.steps]
    if aim.by == "params":
        return [[float(sum(p.numel() for p in step)) for step in counted]] * aim.stages
    states = [float(sum(p.nbytes * (STATE_COPIES if p.requires_grad else 1) for p in step)) for step in counted]
    activations = [step.cost.activations for step in seen.steps]
    counts = (1.0,) * aim.stages if aim.schedule is None else in_flight(aim.schedule)
    return [[state + times * kept for state, kept in zip(states, activations, strict=True)] for times in counts]


def _clock(model: nn.Module, aim: BalanceAim) -> StepClock | None:
    """Return the clock that times a step of the schedule, or None if the step's time is not balanced."""
    if aim.by != "time" or aim.schedule is None:
        return None
    byte = OPERATIONS_PER_BYTE if has_no_values(model) else _seconds_to_copy_byte(next(model.parameters()).device)
    return StepClock(aim.schedule, seconds_per_byte=byte)


def _seconds_to_copy_byte(device: torch.device) -> float:
    """Return the seconds that copying one byte takes."""
    some = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    least = math.inf
    for _ in range(ROUNDS):
        begin = read_clock(cuda=some.is_cuda)
        some.clone()
        least = min(least, read_clock(cuda=some.is_cuda) - begin)
    return least / COPIED_BYTES

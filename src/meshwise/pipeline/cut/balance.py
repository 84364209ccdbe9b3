"""Choose the beginnings of stages so that no stage has too much work: the load of each step, and the best bounds.

Whole pieces are tried first. Where a boundary inside blocks (`block_entry.py`) helps enough, the blocks that contain
one are opened. The values that cross there, and computation on both sides of it, are counted.
"""

import difflib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwise.pipeline.cut.meta_values import is_bare
from meshwise.pipeline.cut.partition import CutError, CutSteps, divide, quicken, worthwhile
from meshwise.pipeline.cut.probe import ROUNDS
from meshwise.pipeline.cut.probe_result import ProbeResult
from meshwise.pipeline.cut.profile_module import now
from meshwise.pipeline.schedules.action import Schedule
from meshwise.pipeline.schedules.schedule_clock import StepClock
from meshwise.pipeline.schedules.validate import in_flight

STATES = 4
"""What a trained parameter takes, in multiples of itself: the parameter, its gradient, two moments of Adam."""

WORTH = 0.02
"""By how much better bounds inside of blocks have to be; and how much less even they may be to send less."""

NEAR = 0.02
"""Two places to cut at, inside of blocks, are one when they differ by less of a mean stage."""

PATIENCE = 4_000_000
"""How many events of the clock may be played to find the best bounds: some seconds."""

COPIED = 2**22
"""Bytes by which it is measured what one that crosses costs: as much as to copy it."""

OPERATIONS_PER_BYTE = 10.0
"""What a byte that crosses costs where operations are counted: what a CPU computes while it copies one."""


@dataclass(frozen=True)
class BalanceAim:
    """Quantity to balance."""

    by: str
    """`time`, `params` or `memory`."""
    stages: int
    """How many there are."""
    schedule: Schedule | None
    """What they will run."""


@dataclass(frozen=True)
class BalancedSteps:
    """A row of steps with its bounds."""

    seen: ProbeResult
    """The steps, with those blocks opened that a boundary is in."""
    bounds: tuple[int, ...]
    """Stage k runs `seen.steps[bounds[k]:bounds[k + 1]]`."""
    opened: tuple[str, ...] = ()
    """Those blocks."""


def bounds_by_name(seen: ProbeResult, *, at: Sequence[str], stages: int, opens: Collection[str] = ()) -> BalancedSteps:
    """Return stages that begin at these pieces, or at modules inside of these blocks.

    Raises CutError when they are too few or too many, are no place to begin at, or out of order.
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
    """Return the best bounds between whole pieces, or inside of these blocks where that is worth it.

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
        found, finer = inner.best(clock, also=[(*pieces, len(fine.places))[bound] for bound in bounds], slack=WORTH)
        if finer < price * (1 - WORTH):
            return _opened(seen, opens, found)
    return BalancedSteps(seen, bounds)


def _opened(seen: ProbeResult, opens: Collection[str], bounds: Sequence[int]) -> BalancedSteps:
    """Return the row with no more blocks opened than these bounds, of the row with all of them opened, need."""
    named = {place: name for name, place in reversed(seen.begins(opens).items())}
    names = [named[bound] for bound in bounds[:-1]]
    needed = [step.key for step in seen.steps if {part.key for part in step.inside[:-1]}.intersection(names)]
    row, begins = seen.opened(needed), seen.begins(needed)
    return BalancedSteps(row, (*(begins[name] for name in names), len(row.steps)), tuple(needed))


class _Row:
    """Steps, and the places that they may be cut at."""

    def __init__(self, steps: CutSteps, places: Sequence[int] | None = None) -> None:
        self.places = range(len(steps.solid)) if places is None else places
        self.steps = steps if places is None else steps.merged(places)
        self._all = steps

    def fewer(self, aim: BalanceAim, *, always: Collection[int], never: Collection[int] = ()) -> "_Row":
        """With those places alone that are worth trying, as long as the stages fit."""
        apart = NEAR * sum(self._all.loads[0]) / aim.stages
        row = _Row(self._all, worthwhile(self._all, apart=apart, always=always, never=never))
        if sum(row.steps.solid) >= aim.stages:
            return row
        return _Row(self._all, [place for place in self.places if place not in never])

    def best(
        self, clock: StepClock | None, *, also: Sequence[int] = (), slack: float = 0.0
    ) -> tuple[tuple[int, ...], float]:
        """Return the best bounds and the minimized quantity: the largest load, or up to `slack` more where less is then
        sent. For the step's time, the search starts from these bounds and from `also`.
        """
        even = divide(self.steps, slack=slack)
        if clock is None:
            return self.places_of(even), self.steps.largest(even)
        inner = (*self.places, len(self._all.solid))
        starts = [even, *([tuple(map(inner.index, also))] if also else [])]
        tries = PATIENCE // len(clock)
        found = [quicken(self.steps, bounds=start, clock=clock, tries=tries) for start in starts]
        bounds, price = min(found, key=lambda one: one[1])
        return self.places_of(bounds), price

    def places_of(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """Return bounds among all steps."""
        return tuple((*self.places, len(self._all.solid))[bound] for bound in bounds)


def _steps(model: nn.Module, seen: ProbeResult, aim: BalanceAim) -> CutSteps:
    """Return what each step adds to a stage, and what a cut before it costs."""
    solid = [bool(step.parameters) for step in seen.steps]
    loads = loads_of(model, seen=seen, aim=aim)
    if aim.by != "time":
        return CutSteps(loads, solid, seen.sent)
    took = [step.took for step in seen.steps]
    return CutSteps(loads, solid, seen.sent, [one.between for one in took], [one.earlier for one in took])


def loads_of(model: nn.Module, *, seen: ProbeResult, aim: BalanceAim) -> list[list[float]]:
    """Per stage, the load of each step."""
    if aim.by == "time":
        work = [step.took.work for step in seen.steps]
        return [[*work[:-1], work[-1] + seen.tail]] * aim.stages
    counted = [[model.get_parameter(name) for name in step.parameters] for step in seen.steps]
    if aim.by == "params":
        return [[float(sum(p.numel() for p in step)) for step in counted]] * aim.stages
    states = [float(sum(p.nbytes * (STATES if p.requires_grad else 1) for p in step)) for step in counted]
    held = [step.took.activations for step in seen.steps]
    times_held = (1.0,) * aim.stages if aim.schedule is None else in_flight(aim.schedule)
    return [[state + times * kept for state, kept in zip(states, held, strict=True)] for times in times_held]


def _clock(model: nn.Module, aim: BalanceAim) -> StepClock | None:
    """Return the clock that times a step of the schedule, or None if the step's time is not balanced."""
    if aim.by != "time" or aim.schedule is None:
        return None
    byte = OPERATIONS_PER_BYTE if is_bare(model) else _seconds_to_copy_byte(next(model.parameters()).device)
    return StepClock(aim.schedule, seconds_per_byte=byte)


def _seconds_to_copy_byte(device: torch.device) -> float:
    """Return the seconds that copying one byte takes."""
    some = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    least = math.inf
    for _ in range(ROUNDS):
        begin = now(cuda=some.is_cuda)
        some.clone()
        least = min(least, now(cuda=some.is_cuda) - begin)
    return least / COPIED

"""The cut of a model into stages, as a value: which stage runs what, what crosses, what is tied, and why it is so.

A cut is made from one example on one rank and is the same for all of them: numbers and names that can be sent, printed
and compared. `build.py` makes a stage from it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal

from torch import nn

from meshwise.model.blocks import Patterns
from meshwise.pipeline.action import Schedule
from meshwise.pipeline.clock import step_seconds
from meshwise.pipeline.partition import CutError, Steps, divide, quicken
from meshwise.pipeline.passes import add_transfers
from meshwise.pipeline.probe import Call, Seen, Step, is_bare, probe
from meshwise.pipeline.trace import Trace, probe_trace, trace_model
from meshwise.pipeline.validate import in_flight

STATES = 4
"""What a trained parameter takes, in multiples of itself: the parameter, its gradient, two moments of Adam."""

SLACK = 0.05
"""By how much of the largest stage a trace may be less even in order to send less."""


@dataclass(frozen=True)
class Where:
    """Where a model may be cut. `Options(cut=Where(at=("blocks.3", "head")))` cuts it by hand."""

    at: tuple[str, ...] = ()
    """By hand: the piece, or the operation of a trace, at which each stage but the first begins."""

    pieces: Patterns = ()
    """Patterns over module names that override what the pieces are (see `meshwise.model.blocks`)."""

    how: Literal["auto", "blocks", "trace"] = "auto"
    """Between the model's pieces, which run the model's own forward, or between the operations that torch.fx traces;
    `auto` traces when there are not enough pieces."""

    def __post_init__(self) -> None:
        if self.how not in ("auto", "blocks", "trace"):
            raise CutError(f"how={self.how!r}: a model is cut by its 'blocks', by its 'trace', or by what fits, 'auto'")


@dataclass(frozen=True)
class Wish:
    """How a model is to be cut."""

    by: Literal["time", "params", "memory"] = "time"
    """What makes two stages equal: seconds of forward and backward (of a model without values, operations), parameters,
    or bytes of parameters, their states and activations."""

    where: Where = Where()
    """Where it may be cut."""

    schedule: Schedule | None = None
    """What the stages will run. `memory` then counts the activations that each stage holds at a time, and `time` makes
    the step short, which is more than small stages: some come earlier than others, and some share a rank."""


@dataclass(frozen=True)
class Cut:
    """A model in stages. Prints as a table."""

    keys: tuple[str, ...]
    """What runs, in order: pieces of the model, a second call of one as `name:2`; of a trace, its operations."""

    modules: tuple[str, ...]
    """The module of each, empty for an operation without one."""

    bounds: tuple[int, ...]
    """Stage k runs `keys[bounds[k]:bounds[k + 1]]`."""

    crossing: tuple[tuple[str, ...], ...]
    """What stage k sends to stage k + 1: keys of outputs."""

    changed: frozenset[str]
    """Keys of outputs that the model changes in place between its pieces: what is sent is a copy, made before."""

    alike: frozenset[str]
    """Keys of outputs that are as large as what their piece is given."""

    holders: Mapping[str, tuple[int, ...]]
    """The stages that hold each parameter, under its first name."""

    parameters: tuple[int, ...]
    """How many elements of parameters each stage holds, with those that others hold as well."""

    loads: tuple[float, ...]
    """What was balanced, per stage."""

    by: str
    """What that is."""

    trace: Trace | None = field(default=None, compare=False)
    """The operations that the keys are, of a model that is cut between them."""

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.bounds) - 1

    @property
    def ties(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages hold: each is one logical parameter, whose gradients have to be summed."""
        return {name: stages for name, stages in self.holders.items() if len(stages) > 1}

    @property
    def imbalance(self) -> float:
        """The largest stage's load, as a multiple of the mean."""
        return max(self.loads) * self.stages / (sum(self.loads) or 1.0)

    def __str__(self) -> str:
        total = sum(self.loads) or 1.0
        rows = [("stage", "runs", "parameters", self.by, "part", "then sends")]
        for stage, (start, stop) in enumerate(pairwise(self.bounds)):
            first, last = self.keys[start], self.keys[stop - 1]
            rows.append(
                (
                    str(stage),
                    first if stop - start == 1 else f"{first} … {last} ({stop - start})",
                    f"{self.parameters[stage]:,}",
                    _amount(self.loads[stage], self.by),
                    f"{100 * self.loads[stage] / total:.1f} %",
                    ", ".join(self.crossing[stage]) if stage + 1 < self.stages else "",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.append(f"by {self.by}, the largest stage is {self.imbalance:.2f} times the mean")
        lines += [f"{name} is on stages {', '.join(map(str, on))}: one parameter" for name, on in self.ties.items()]
        return "\n".join(lines)


def cut_model(model: nn.Module, *, stages: int, call: Call, wish: Wish = Wish()) -> Cut:
    """Cut a model into stages, as even as can be.

    `call(model)` runs an example micro-batch, on the device of the model's parameters, and returns the result or the
    loss; the model, torch's generators and the gradients are left as they were.

    Raises CutError when fewer stages fit than are asked for, saying how many; when `at` names no place to cut, or
    places out of order; for a schedule of another number of stages; and for a model that cannot be traced.
    """
    if wish.by not in ("time", "params", "memory"):
        raise CutError(f"balance by 'time', 'params' or 'memory', not {wish.by!r}")
    if wish.schedule is not None and wish.schedule.stages != stages:
        raise CutError(f"the schedule has {wish.schedule.stages} stages, the cut {stages}")
    where, timed = wish.where, wish.by == "time"
    if where.how != "trace":
        seen = probe(model, call=call, pieces=where.pieces, timed=timed)
        if where.how == "blocks" or len(seen.steps) >= stages:
            return _cut(model, seen, stages, wish)
        try:
            return _cut_trace(model, call, stages, wish)
        except CutError as error:
            raise CutError(
                f"{stages} stages do not fit: {type(model).__name__} has {len(seen.steps)} pieces, so at most "
                f"pp·virtual_stages={len(seen.steps)}; and as a trace: {error}"
            ) from None
    return _cut_trace(model, call, stages, wish)


def _cut_trace(model: nn.Module, call: Call, stages: int, wish: Wish) -> Cut:
    trace = trace_model(model, call=call)
    return _cut(model, probe_trace(model, trace=trace, call=call, timed=wish.by == "time"), stages, wish, trace=trace)


def _cut(model: nn.Module, seen: Seen, stages: int, wish: Wish, *, trace: Trace | None = None) -> Cut:
    keys = tuple(step.key for step in seen.steps)
    loads = _loads(model, seen.steps, stages, wish)
    crossing = [seen.crossing(position) for position in range(len(keys))]
    if wish.where.at:
        bounds = _by_hand(keys, wish.where.at, stages)
    else:
        sizes = [float(sum(seen.steps[source].output for source in sources)) for sources in crossing]
        solid = [bool(step.parameters) for step in seen.steps]
        steps = Steps(loads, solid, sizes)
        bounds = divide(steps, slack=0.0 if trace is None else SLACK)
        if wish.schedule is not None and wish.by == "time" and trace is None:
            bounds = quicken(steps, bounds=bounds, seconds=partial(step_seconds, add_transfers(wish.schedule)))
    holders = _holders(model, seen, bounds)
    return Cut(
        keys=keys,
        modules=tuple(step.module for step in seen.steps),
        bounds=bounds,
        crossing=tuple(tuple(keys[source] for source in crossing[bound]) for bound in bounds[1:-1]),
        changed=frozenset(keys[step] for step in seen.changed),
        alike=frozenset(step.key for step in seen.steps if step.alike),
        holders=holders,
        parameters=tuple(
            sum(model.get_parameter(name).numel() for name, on in holders.items() if stage in on)
            for stage in range(stages)
        ),
        loads=tuple(sum(loads[k][start:stop]) for k, (start, stop) in enumerate(pairwise(bounds))),
        by="operations" if wish.by == "time" and is_bare(model) else wish.by,
        trace=trace,
    )


def _holders(model: nn.Module, seen: Seen, bounds: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter; one that nothing uses is on the last."""
    last = len(bounds) - 2
    stages: dict[str, set[int]] = {name: set(range(last + 1)) for name in seen.everywhere}
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        for step in seen.steps[start:stop]:
            for name in step.parameters:
                stages.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(stages.get(name, {last}))) for name, _ in model.named_parameters()}


def _loads(model: nn.Module, steps: Sequence[Step], stages: int, wish: Wish) -> list[list[float]]:
    """Per stage, the load of each step."""
    if wish.by == "time":
        return [[step.took.work for step in steps]] * stages
    counted = [[model.get_parameter(name) for name in step.parameters] for step in steps]
    if wish.by == "params":
        return [[float(sum(p.numel() for p in step)) for step in counted]] * stages
    states = [float(sum(p.nbytes * (STATES if p.requires_grad else 1) for p in step)) for step in counted]
    held = [step.took.activations for step in steps]
    times_held = (1.0,) * stages if wish.schedule is None else in_flight(wish.schedule)
    return [[state + times * kept for state, kept in zip(states, held, strict=True)] for times in times_held]


def _by_hand(keys: Sequence[str], at: Sequence[str], stages: int) -> tuple[int, ...]:
    if len(at) != stages - 1:
        raise CutError(f"{stages} stages need {stages - 1} names to begin at, not {len(at)}: {', '.join(at)}")
    for name in at:
        if name not in keys[1:]:
            near = difflib.get_close_matches(name, keys[1:], n=3, cutoff=0.4) or list(keys[1:4])
            raise CutError(f"a stage cannot begin at {name!r}; it can at, for example, {', '.join(near)}")
    bounds = (0, *map(keys.index, at), len(keys))
    if list(bounds) != sorted(set(bounds)):
        raise CutError(f"the model runs {', '.join(sorted(at, key=keys.index))} in this order, not {', '.join(at)}")
    return bounds


def _amount(load: float, by: str) -> str:
    if by == "time":
        return f"{1000 * load:.3g} ms"
    if by == "operations":
        return f"{load / 1e9:,.3g} GFLOP"
    return f"{load / 2**20:,.1f} MiB" if by == "memory" else f"{load:,.0f}"

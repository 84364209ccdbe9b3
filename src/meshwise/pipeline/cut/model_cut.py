"""Cut a model into stages; the cut is a value that says what each stage runs, holds and sends.

A cut is made from one example on one rank, and the other ranks receive it: numbers and names that can be sent, printed
and compared. `build_stage.py` makes a stage from it.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from torch import nn

from meshwise.model.parameter_units import Patterns, partition
from meshwise.pipeline.cut.balance import BalanceAim, BalancedSteps, balance, bounds_by_name, loads_of
from meshwise.pipeline.cut.meta_values import has_no_values
from meshwise.pipeline.cut.module_hooks import refuse_hooks
from meshwise.pipeline.cut.partition import CutError
from meshwise.pipeline.cut.probe import Call, probe
from meshwise.pipeline.cut.probe_result import ProbeResult
from meshwise.pipeline.run.remote_parameter import REMEDY
from meshwise.pipeline.schedules.action import Schedule


@dataclass(frozen=True)
class CutOptions:
    """Options for cutting a model. `Options(cut=CutOptions(at=("blocks.3", "head")))` cuts it by hand."""

    at: tuple[str, ...] = ()
    """By hand: the piece, or the module inside of a block, at which each stage but the first begins."""
    pieces: Patterns = ()
    """Patterns over module names that override what the pieces are (see `meshwise.model.parameter_units`)."""
    how: Literal["auto", "blocks"] = "auto"
    """`blocks` cuts between the model's pieces, `auto` also inside of blocks where that pays."""
    made: "ModelCut | None" = field(default=None, compare=False, repr=False)
    """An earlier cut of the same model, which is used again."""

    def __post_init__(self) -> None:
        if self.how not in ("auto", "blocks"):
            raise CutError(f"how={self.how!r}: a model is cut between its 'blocks', or where it is most even, 'auto'")


@dataclass(frozen=True)
class MatrixPairs:
    """Names of the matrices that tensor parallelism splits in pairs; no stage begins between the two of a pair."""

    colwise: frozenset[str] = frozenset()
    """The first matrix of each pair."""
    rowwise: frozenset[str] = frozenset()
    """The second matrix of each pair."""

    def are_whole(self, module: str) -> bool:
        """Return whether the module contains both sides of its pairs, or none."""
        colwise, rowwise = (
            any(f"{name}.".startswith(f"{module}.") for name in side) for side in (self.colwise, self.rowwise)
        )
        return colwise == rowwise


@dataclass(frozen=True)
class CutRequest:
    """Request for a cut: the quantity to balance and the options."""

    by: Literal["time", "params", "memory"] = "time"
    """Quantity to balance: seconds of forward and backward (on the meta device, operations), parameters, or bytes of
    parameters, their states and activations."""
    where: CutOptions = CutOptions()
    """Places at which the model may be cut."""
    schedule: Schedule | None = None
    """Schedule of the stages. With it, `memory` counts the micro-batches that each stage holds, and `time` minimizes
    the step instead of the largest stage."""
    pairs: MatrixPairs = MatrixPairs()
    """Pairs that tensor parallelism splits."""


@dataclass(frozen=True)
class StageContents:
    """Contents of a stage, in running order."""

    keys: tuple[str, ...]
    """Keys of the steps; only the blocks in `opened` are opened."""
    modules: tuple[str, ...]
    """The module of each."""
    start: int
    """Place of the first step that the stage computes."""
    stop: int
    """Place after the last step that it computes."""
    opened: tuple[str, ...]
    """Blocks of which the stage computes a part."""


@dataclass(frozen=True)
class ModelCut:
    """A model in stages. Prints as a table."""

    keys: tuple[str, ...]
    """Steps in running order: pieces of the model, a second call of one as `name:2`. An opened block has its modules,
    and then, under its own name, the rest of its code."""
    modules: tuple[str, ...]
    """Name of the module of each step."""
    bounds: tuple[int, ...]
    """Stage k runs `keys[bounds[k]:bounds[k + 1]]`."""
    crossing: tuple[tuple[str, ...], ...]
    """Keys of the outputs that stage k sends to stage k + 1."""
    changed: frozenset[str]
    """Keys of outputs that the model changes in place between its pieces; stages send copies made before."""
    same_shape: frozenset[str]
    """Keys of outputs with the shape of their piece's input."""
    holders: Mapping[str, tuple[int, ...]]
    """The stages that hold each parameter, under its first name."""
    parameters: tuple[int, ...]
    """Elements of the parameters that each stage holds; tied ones count on each."""
    loads: tuple[float, ...]
    """Balanced quantity of each stage."""
    by: str
    """Name of the balanced quantity."""
    opened: tuple[str, ...] = ()
    """Blocks with a boundary inside."""
    writes: bool = False
    """Whether the model changes its batch in place; then each stage receives a copy."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    @property
    def ties(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages hold; each is one logical parameter, whose gradients are summed."""
        return {name: stages for name, stages in self.holders.items() if len(stages) > 1}

    def contents(self, stage: int) -> StageContents:
        """Return the contents of a stage; blocks without a boundary of this stage inside are whole."""
        start, stop = self.bounds[stage : stage + 2]
        kept, opened = list(range(len(self.keys))), []
        for name in self.opened:
            last = self.keys.index(name)
            first = next(place for place in range(last) if self.keys[place].startswith(f"{name}."))
            if any(first < bound <= last for bound in (start, stop)):
                opened.append(name)
            else:
                kept = [place for place in kept if not first <= place < last]
        return StageContents(
            keys=tuple(self.keys[place] for place in kept),
            modules=tuple(self.modules[place] for place in kept),
            start=sum(place < start for place in kept),
            stop=sum(place < stop for place in kept),
            opened=tuple(opened),
        )

    def coarser(self, at: Sequence[str], *, model: nn.Module) -> "ModelCut":
        """Return the cut with only those stage boundaries that lie before the keys `at`.

        Raises ValueError for a key at which no stage begins.
        """
        begins = [self.keys[bound] for bound in self.bounds[:-1]]
        firsts = [0, *(begins.index(key) for key in at)]
        stage_of = [bisect_right(firsts, stage) - 1 for stage in range(self.stages)]
        holders = {name: tuple(sorted({stage_of[stage] for stage in on})) for name, on in self.holders.items()}
        return dataclasses.replace(
            self,
            bounds=tuple(self.bounds[first] for first in (*firsts, self.stages)),
            crossing=tuple(self.crossing[first - 1] for first in firsts[1:]),
            holders=holders,
            parameters=_parameters(model, holders, len(firsts)),
            loads=tuple(sum(self.loads[start:stop]) for start, stop in pairwise((*firsts, self.stages))),
        )

    @property
    def imbalance(self) -> float:
        """Load of the largest stage, as a multiple of the mean."""
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
        lines += [f"{name} is opened: a stage begins inside" for name in self.opened]
        lines += [f"{name} is on stages {', '.join(map(str, on))}: one parameter" for name, on in self.ties.items()]
        return "\n".join(lines)


def cut_model(model: nn.Module, *, stages: int, call: Call, request: CutRequest = CutRequest()) -> ModelCut:
    """Return a cut of a model into stages, as even as possible.

    `call(model)` runs an example micro-batch on the device of the model's parameters and returns the result or the
    loss. The model, torch's generators and the gradients stay as they were.

    Raises CutError when fewer stages fit than are asked for (with the number), and when `at` names no place to cut, or
    places out of order. Also for a schedule of another number of stages.
    """
    if request.schedule is not None and request.schedule.stages != stages:
        raise CutError(f"the schedule has {request.schedule.stages} stages, the cut {stages}")
    where, timed = request.where, request.by == "time"
    if where.made is not None and where.made.stages == stages:
        return where.made
    opening = where.how == "auto" and not where.pieces and not (where.at and _are_pieces(where.at, model))
    seen = probe(model, call=call, pieces=where.pieces, timed=timed, opens=opening)
    opens = [
        step.key
        for step in seen.steps
        if step.inside and all(request.pairs.are_whole(part.module) for part in step.inside)
    ]
    fit = sum(bool(step.parameters) for step in seen.opened(opens).steps)
    if fit < stages:
        raise CutError(
            f"{stages} stages do not fit: {type(model).__name__} has {fit} pieces, so at most pp·virtual_stages={fit}"
        )
    if where.at:
        return _cut(model, bounds_by_name(seen, at=where.at, stages=stages, opens=opens), request)
    return _cut(model, balance(model, seen=seen, aim=_aim(request, stages), opens=opens), request)


def cut_pieces(model: nn.Module, *, call: Call, pieces: Patterns = ()) -> ModelCut:
    """Return a cut with one stage for each piece with parameters. Raises CutError as `cut_model` does."""
    seen = probe(model, call=call, pieces=pieces)
    begins = [place for place, step in enumerate(seen.steps) if step.parameters]
    return _cut(model, BalancedSteps(seen, (0, *begins[1:], len(seen.steps))), CutRequest(by="params"))


def _are_pieces(names: Sequence[str], model: nn.Module) -> bool:
    """Return whether these names are whole pieces, and none lies inside of a block."""
    pieces = {piece.module for unit in partition(model) for piece in unit}
    return all(name.partition(":")[0] in pieces for name in names)


def _aim(request: CutRequest, stages: int) -> BalanceAim:
    return BalanceAim(request.by, stages, request.schedule)


def _cut(model: nn.Module, balanced: BalancedSteps, request: CutRequest) -> ModelCut:
    seen, bounds = balanced.seen, balanced.bounds
    if len(bounds) > 2:
        refuse_hooks(model, pieces={step.module for step in seen.steps})
    _refuse_effects(seen, bounds)
    keys, stages = tuple(step.key for step in seen.steps), len(bounds) - 1
    holders = _holders(model, seen, bounds)
    _refuse_readers(seen, bounds, holders)
    loads = loads_of(model, seen=seen, aim=_aim(request, stages))
    return ModelCut(
        keys=keys,
        modules=tuple(step.module for step in seen.steps),
        bounds=bounds,
        crossing=tuple(seen.crossing(bound) for bound in bounds[1:-1]),
        changed=seen.changed.intersection(keys),
        same_shape=frozenset(step.key for step in seen.steps if step.same_shape),
        holders=holders,
        parameters=_parameters(model, holders, stages),
        loads=tuple(sum(loads[k][start:stop]) for k, (start, stop) in enumerate(pairwise(bounds))),
        by="operations" if request.by == "time" and has_no_values(model) else request.by,
        opened=balanced.opened,
    )


def _refuse_effects(seen: ProbeResult, bounds: Sequence[int]) -> None:
    """Raise CutError for a buffer that several stages would change, and for a side effect that a later stage needs."""
    if seen.changed_buffers and len(bounds) > 2:
        raise CutError(
            f"the model changes its buffer {min(seen.changed_buffers)} outside of its pieces, so that each stage would "
            "change a copy of its own. Put the buffer, and what changes it, into the forward of a module of its own"
        )
    for bound in bounds[1:-1]:
        if found := seen.effect(bound):
            piece, user = found
            raise CutError(
                f"a stage cannot begin at {seen.steps[bound].key}: {user} needs a side effect of {piece}. It changes "
                "an input, or stores a value in a list, a mapping or an attribute. "
                f"Let {piece} return that value, or choose where stages begin: Options(cut=CutOptions(at=…)). "
                "Models of transformers have such effects with output_attentions and output_router_logits: leave these "
                "out"
            )


def _refuse_readers(seen: ProbeResult, bounds: Sequence[int], holders: Mapping[str, Sequence[int]]) -> None:
    """Raise CutError where code between pieces computes with a parameter that its stage does not hold."""
    users = [(step.key, bisect_right(bounds, place) - 1, step.dependencies) for place, step in enumerate(seen.steps)]
    for user, stage, past in (*users, ("the result", len(bounds) - 2, seen.result)):
        for name in sorted(past.parameters):
            if stage not in holders[name]:
                raise CutError(
                    f"{user}, on stage {stage}, needs what the model computes with {name} outside of that module, and "
                    f"the parameter is on stage {holders[name][0]}. {REMEDY}"
                )


def _holders(model: nn.Module, seen: ProbeResult, bounds: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the stages that use each parameter; an unused parameter is on the last stage."""
    last = len(bounds) - 2
    stages: dict[str, set[int]] = {name: set(range(last + 1)) for name in seen.everywhere}
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        for step in seen.steps[start:stop]:
            for name in step.parameters:
                stages.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(stages.get(name, {last}))) for name, _ in model.named_parameters()}


def _parameters(model: nn.Module, holders: Mapping[str, Sequence[int]], stages: int) -> tuple[int, ...]:
    found = [0] * stages
    for name, on in holders.items():
        for stage in on:
            found[stage] += model.get_parameter(name).numel()
    return tuple(found)


def _amount(load: float, by: str) -> str:
    if by == "time":
        return f"{1000 * load:.3g} ms"
    if by == "operations":
        return f"{load / 1e9:,.3g} GFLOP"
    return f"{load / 2**20:,.1f} MiB" if by == "memory" else f"{load:,.0f}"

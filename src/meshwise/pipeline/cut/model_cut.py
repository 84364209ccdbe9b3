"""Cut a model into pipeline stages; a `ModelCut` says which modules each stage runs, and what it holds and sends.

One rank makes the cut and sends it to the other ranks as names and numbers. `make_stage` makes a stage from it."""

import dataclasses
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from torch import nn

from meshwise.base.text_format import align_columns
from meshwise.model.parameter_units import Patterns, partition
from meshwise.pipeline.cut.probe import Call, probe
from meshwise.pipeline.cut.probe_result import CutError, ProbeResult, has_backward_hooks, has_no_values
from meshwise.pipeline.cut.stage_balance import StageBounds, balance, bounds_by_name, loads_of
from meshwise.pipeline.schedules.schedule_table import Schedule

REMEDY = (
    "Give it a second name in the module that reads it, as in self.shared = other.weight in its __init__, and read "
    "self.shared, so that each stage has it. Or cut by hand, so that both are on one stage: "
    "Options(cut=CutOptions(at=…)), or model.cut_at of a job"
)
"""Advice at the end of an error about a stage that needs a parameter of another stage."""


@dataclass(frozen=True)
class CutOptions:
    """Options of a user for cutting a model: `Options(cut=CutOptions(at=("blocks.3", "head")))` cuts it by hand."""

    at: tuple[str, ...] = ()
    """Where each stage except the first begins: a piece, or a module inside a block. Empty: the most even stages."""
    pieces: Patterns = ()
    """Patterns over module names that replace the automatic choice of pieces (see `meshwise.model.parameter_units`)."""
    how: Literal["auto", "blocks"] = "auto"
    """`blocks`: stages begin at pieces. `auto`: stages also begin inside of blocks if that makes them more even."""
    made: "ModelCut | None" = field(default=None, compare=False, repr=False)
    """An earlier cut of the same model; it is used again if it has as many stages as this request."""

    def __post_init__(self) -> None:
        if self.how not in ("auto", "blocks"):
            raise CutError(f"how={self.how!r}: write 'blocks' to cut between blocks, or 'auto' to cut inside them too")


@dataclass(frozen=True)
class CutRequest:
    """Request for a cut: the quantity to balance and the options."""

    by: Literal["time", "params", "memory"] = "time"
    """Quantity to balance. `time`: seconds of forward and backward (on the meta device, operations). `params`: elements
    of parameters. `memory`: bytes of parameters, their gradients and optimizer states, and activations."""
    options: CutOptions = CutOptions()
    """Places at which stages may begin, and how they are chosen."""
    schedule: Schedule | None = None
    """Schedule of the stages. With it, `memory` counts the micro-batches that each stage holds, and `time` minimizes
    the training step instead of the largest stage."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Role of each module in tensor parallelism, by name. No stage begins between a `colwise` and a `rowwise` matrix,
    because there the ranks have different features."""

    def keeps_pairs(self, module: str) -> bool:
        """Return whether a module contains both a colwise and a rowwise matrix, or neither."""
        inside = {role for name, role in self.roles.items() if f"{name}.".startswith(f"{module}.")}
        return ("colwise" in inside) == ("rowwise" in inside)


@dataclass(frozen=True)
class StageContents:
    """Calls of the whole model as one stage sees them, and the range of calls that it computes."""

    keys: tuple[str, ...]
    """Keys of the calls in running order. A block of `split_blocks` has the keys of its modules, then its own key."""
    modules: tuple[str, ...]
    """Name of the module of each call."""
    start: int
    """Place in `keys` of the first call that the stage computes."""
    stop: int
    """Place after the last call that the stage computes."""
    split_blocks: tuple[str, ...]
    """Blocks of which this stage computes a part and another stage the rest."""


@dataclass(frozen=True)
class ModelCut:
    """Division of a model into pipeline stages. Prints as a table."""

    keys: tuple[str, ...]
    """Calls of the model's pieces in running order; the second call of a piece is `name:2`. A split block has the keys
    of its modules, and last its own name, which is the key for the rest of the block's code."""
    modules: tuple[str, ...]
    """Name of the module of each call."""
    bounds: tuple[int, ...]
    """Stage k runs `keys[bounds[k]:bounds[k + 1]]`."""
    sends: tuple[tuple[str, ...], ...]
    """For each stage k except the last, the keys of the outputs that it sends to stage k + 1."""
    changed: frozenset[str]
    """Keys of outputs that the model changes in place between its pieces; stages send a copy from before the change."""
    same_shape: frozenset[str]
    """Keys of outputs that are one tensor with the shape and dtype of the piece's first input."""
    holders: Mapping[str, tuple[int, ...]]
    """Stages that hold each parameter, by the parameter's first name."""
    parameters: tuple[int, ...]
    """Number of parameter elements on each stage; a tied parameter counts on each of its stages."""
    loads: tuple[float, ...]
    """Load of each stage: seconds, operations, elements or bytes, as `by` says."""
    by: str
    """Name of the balanced quantity: time, operations, params or memory."""
    split_blocks: tuple[str, ...] = ()
    """Blocks with a stage boundary inside."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    @property
    def ties(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages hold, with their stages; the gradients of all copies are summed."""
        return {name: stages for name, stages in self.holders.items() if len(stages) > 1}

    def contents(self, stage: int) -> StageContents:
        """Return the calls as a stage sees them. A block is split only if this stage has a boundary inside it."""
        start, stop = self.bounds[stage : stage + 2]
        kept, split_blocks = list(range(len(self.keys))), []
        for name in self.split_blocks:
            last = self.keys.index(name)
            first = next(place for place in range(last) if self.keys[place].startswith(f"{name}."))
            if any(first < bound <= last for bound in (start, stop)):
                split_blocks.append(name)
            else:
                kept = [place for place in kept if not first <= place < last]
        return StageContents(
            keys=tuple(self.keys[place] for place in kept),
            modules=tuple(self.modules[place] for place in kept),
            start=sum(place < start for place in kept),
            stop=sum(place < stop for place in kept),
            split_blocks=tuple(split_blocks),
        )

    def coarser(self, at: Sequence[str], *, model: nn.Module) -> "ModelCut":
        """Return a cut whose stages begin at the first call and at the keys `at`; it adds up the loads of this cut.

        Raises ValueError for a key at which no stage of this cut begins."""
        begins = [self.keys[bound] for bound in self.bounds[:-1]]
        firsts = [0, *(begins.index(key) for key in at)]
        stage_of = [bisect_right(firsts, stage) - 1 for stage in range(self.stages)]
        holders = {name: tuple(sorted({stage_of[stage] for stage in on})) for name, on in self.holders.items()}
        return dataclasses.replace(
            self,
            bounds=tuple(self.bounds[first] for first in (*firsts, self.stages)),
            sends=tuple(self.sends[first - 1] for first in firsts[1:]),
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
            first, last, load = self.keys[start], self.keys[stop - 1], self.loads[stage]
            runs = first if stop - start == 1 else f"{first} … {last} ({stop - start})"
            sizes = (f"{self.parameters[stage]:,}", _amount(load, self.by), f"{100 * load / total:.1f} %")
            sends = ", ".join(self.sends[stage]) if stage + 1 < self.stages else ""
            rows.append((str(stage), runs, *sizes, sends))
        lines = [align_columns(rows, left=len(rows[0]))]
        lines.append(f"by {self.by}, the largest stage is {self.imbalance:.2f} times the mean")
        lines += [f"{name} is split: a stage begins inside" for name in self.split_blocks]
        lines += [f"{name} is on stages {', '.join(map(str, on))}: one parameter" for name, on in self.ties.items()]
        return "\n".join(lines)


def cut_model(model: nn.Module, *, stages: int, call: Call, request: CutRequest = CutRequest()) -> ModelCut:
    """Return a cut of a model into stages, as even as possible, or the cut by hand that `request` asks for.

    `call(model)` runs an example micro-batch on the device of the model's parameters, and returns the output or the
    loss. The model, torch's generators and the gradients do not change.

    Raises CutError when not so many stages fit, or the schedule has another number of stages. Raises it also when `at`
    has a name at which no stage can begin, or names in the wrong order."""
    if request.schedule is not None and request.schedule.stages != stages:
        raise CutError(f"the schedule has {request.schedule.stages} stages, the cut {stages}")
    where, timed = request.options, request.by == "time"
    if where.made is not None and where.made.stages == stages:
        return where.made
    pieces = {piece.module for unit in partition(model) for piece in unit}
    between = bool(where.at) and all(name.partition(":")[0] in pieces for name in where.at)  # not inside blocks
    splits = where.how == "auto" and not where.pieces and not between
    seen = probe(model, call=call, pieces=where.pieces, timed=timed, splits=splits)
    splittable = [
        called.key
        for called in seen.calls
        if called.inside and all(request.keeps_pairs(part.module) for part in called.inside)
    ]
    fit = sum(bool(called.parameters) for called in seen.with_split_blocks(splittable).calls)
    if fit < stages:
        raise CutError(
            f"{stages} stages do not fit: {type(model).__name__} has {fit} pieces, so at most pp·virtual_stages={fit}"
        )
    if where.at:
        return _cut(model, bounds_by_name(seen, at=where.at, stages=stages, splittable=splittable), request)
    bounds = balance(model, seen=seen, by=request.by, stages=stages, schedule=request.schedule, splittable=splittable)
    return _cut(model, bounds, request)


def cut_pieces(model: nn.Module, *, call: Call, pieces: Patterns = ()) -> ModelCut:
    """Return a cut with one stage for each piece that has parameters. Arguments and errors are as in `cut_model`."""
    seen = probe(model, call=call, pieces=pieces)
    begins = [place for place, called in enumerate(seen.calls) if called.parameters]
    return _cut(model, StageBounds(seen, (0, *begins[1:], len(seen.calls))), CutRequest(by="params"))


def _cut(model: nn.Module, balanced: StageBounds, request: CutRequest) -> ModelCut:
    seen, bounds = balanced.seen, balanced.bounds
    if len(bounds) > 2:
        _refuse_hooks(model, {called.module for called in seen.calls})
    _refuse_effects(seen, bounds)
    keys, stages = tuple(called.key for called in seen.calls), len(bounds) - 1
    holders = _holders(model, seen, bounds)
    _refuse_readers(seen, bounds, holders)
    loads = loads_of(model, seen=seen, by=request.by, stages=stages, schedule=request.schedule)
    return ModelCut(
        keys=keys,
        modules=tuple(called.module for called in seen.calls),
        bounds=bounds,
        sends=tuple(seen.keys_sent(bound) for bound in bounds[1:-1]),
        changed=seen.changed.intersection(keys),
        same_shape=frozenset(called.key for called in seen.calls if called.same_shape),
        holders=holders,
        parameters=_parameters(model, holders, stages),
        loads=tuple(sum(loads[k][start:stop]) for k, (start, stop) in enumerate(pairwise(bounds))),
        by="operations" if request.by == "time" and has_no_values(model) else request.by,
        split_blocks=balanced.split_blocks,
    )


def _refuse_hooks(model: nn.Module, pieces: Collection[str]) -> None:
    """Raise CutError if a piece, or a module around pieces, has backward hooks: no stage sees all its gradients."""
    paths = (piece.split(".") for piece in pieces)
    for name in sorted({".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)}):
        if has_backward_hooks(model.get_submodule(name)):
            raise CutError(
                f"{name} has backward hooks, which see no gradient that another stage computes or receives. Put them "
                "on modules inside of blocks, on parameters, or on the whole model"
            )


def _refuse_effects(seen: ProbeResult, bounds: Sequence[int]) -> None:
    """Raise CutError if several stages would change one buffer, or if a later stage needs a side effect."""
    if seen.changed_buffers and len(bounds) > 2:
        raise CutError(
            f"the model changes its buffer {min(seen.changed_buffers)} outside of its pieces, so each stage would "
            "change its own copy. Put the buffer, and the code that changes it, into one separate module"
        )
    for bound in bounds[1:-1]:
        if found := seen.effect(bound):
            piece, user = found
            raise CutError(
                f"a stage cannot begin at {seen.calls[bound].key}: {user} needs a side effect of {piece}. It changes "
                "an input, or stores a value in a list, a mapping or an attribute. "
                f"Let {piece} return that value, or choose where stages begin: Options(cut=CutOptions(at=…)). "
                "In transformers, output_attentions and output_router_logits have such effects: leave them out"
            )


def _refuse_readers(seen: ProbeResult, bounds: Sequence[int], holders: Mapping[str, Sequence[int]]) -> None:
    """Raise CutError if code between pieces computes with a parameter that its own stage does not hold."""
    users = [(call.key, bisect_right(bounds, place) - 1, call.dependencies) for place, call in enumerate(seen.calls)]
    for user, stage, dependencies in (*users, ("the result", len(bounds) - 2, seen.result)):
        for name in sorted(dependencies.parameters):
            if stage not in holders[name]:
                raise CutError(
                    f"{user}, on stage {stage}, needs what the model computes with {name} outside of that module, and "
                    f"the parameter is on stage {holders[name][0]}. {REMEDY}"
                )


def _holders(model: nn.Module, seen: ProbeResult, bounds: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter: the stages that use it, or the last stage if none does."""
    last = len(bounds) - 2
    stages: dict[str, set[int]] = {name: set(range(last + 1)) for name in seen.everywhere}
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        for called in seen.calls[start:stop]:
            for name in called.parameters:
                stages.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(stages.get(name, {last}))) for name, _ in model.named_parameters()}


def _parameters(model: nn.Module, holders: Mapping[str, Sequence[int]], stages: int) -> tuple[int, ...]:
    sizes = {name: model.get_parameter(name).numel() for name in holders}
    return tuple(sum(sizes[name] for name, on in holders.items() if stage in on) for stage in range(stages))


def _amount(load: float, by: str) -> str:
    if by == "time":
        return f"{1000 * load:.3g} ms"
    if by == "operations":
        return f"{load / 1e9:,.3g} GFLOP"
    return f"{load / 2**20:,.1f} MiB" if by == "memory" else f"{load:,.0f}"

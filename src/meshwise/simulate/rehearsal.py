"""Rehearse a plan: run `parallelize` and two steps of the training code on one rank of each stage, without values.

| equal parts | the part that runs |
|---|---|
| ranks that differ in dp, tp or cp only | the first of them |
| micro-batches but the first and the last | one of them |
| steps after the first, which makes the optimizer's state | the second |

Every refusal of the code appears here with the same words, except those that depend on values: a loss that is not
finite or counts nothing, an index outside of a vocabulary, a tensor that is initialized in part.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from meshwise.base import tensor_tree as tree
from meshwise.comm.api.stopwatch import Activity, StepPhase
from meshwise.engine.cut_agreement import cut_for, pairs_of, plan_schedule
from meshwise.engine.parallelize import Options
from meshwise.model.deferred_init import ParameterSource, shapes_of
from meshwise.model.forward import Loss, default_forward
from meshwise.model.parameter_table import check_trains
from meshwise.model.shape_constants import ShapeConstants
from meshwise.pipeline.cut.model_cut import CutRequest
from meshwise.pipeline.cut.partition import CutError
from meshwise.pipeline.schedules.action import Action, ActionKind, Schedule
from meshwise.pipeline.schedules.passes import lower
from meshwise.plan import Plan
from meshwise.simulate.equal_ranks import rehearsed_ranks
from meshwise.simulate.meta_batch import MetaBatch
from meshwise.simulate.meta_value_errors import explaining_values, wrap_for_rehearsal
from meshwise.simulate.rehearsal_subject import Device, RehearsalSubject
from meshwise.simulate.rehearsal_world import StageMessages
from meshwise.simulate.tape import Category, MemoryChange, Tape, TapeSegment
from meshwise.simulate.value_requests import explaining_values, in_rehearsal
from meshwise.tensor.detect.find_parts import find_parts


@dataclass(frozen=True)
class Rehearsal:
    """Tapes of every rank of a plan."""

    plan: Plan
    """With every degree filled in."""
    rows: int
    """Rows of the global batch."""
    tokens: int
    """Count of the loss over the global batch."""
    schedule: Schedule
    """What each rank of the pipeline does, with transfers, gathers and reductions; without pp, one row of F and B."""
    tapes: tuple[Tape, ...]
    """Tapes of one rank of each stage, by index along pp."""
    device: Device
    """Kind of device of each rank."""
    _steps: dict[tuple[int, bool], tuple[TapeSegment, ...]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    """Steps by the arguments of `step`."""

    @property
    def asked(self) -> bool:
        """True if the model or the loss read values of its batch: another batch may lead to other operations."""
        return any(tape.asked for tape in self.tapes)

    def step(self, index: int, *, first: bool = False) -> tuple[TapeSegment, ...]:
        """Return the segments of a step of the rank with this index along pp; `first`: of a run's first step."""
        if (index, first) not in self._steps:
            self._steps[index, first] = self._step(index, first=first)
        return self._steps[index, first]

    def _step(self, index: int, *, first: bool) -> tuple[TapeSegment, ...]:
        tape, row = self.tapes[index], self.schedule.rows[index]
        mine, theirs = (self.schedule.stages_of(rank) for rank in (index, tape.index))
        names = dict(zip(theirs, mine, strict=True))
        found = {_renamed(segment.activity, names): segment for segment in tape.steady}
        stand_ins = _stand_ins(found)
        passed: Mapping[Activity, TapeSegment] = {}
        if first:  # of which one micro-batch has been run: a pipeline takes with a step's first what it takes once
            early = self.plan.pp > 1
            begun = {_renamed(segment.activity, names, first=early): segment for segment in tape.first}
            passed = {} if early else {activity: part for activity, part in begun.items() if _is_alone(activity, begun)}
            found |= {activity: part for activity, part in begun.items() if activity not in passed}
        during = [
            TapeSegment(action, (*passed[action].entries, *part.entries) if action in passed else part.entries)
            for action in row
            if (part := found.get(action) or stand_ins.get((action.stage, action.kind))) is not None
        ]
        around = [segment for activity, segment in found.items() if not isinstance(activity, Action)]
        before = [segment for segment in around if segment.activity is StepPhase.BEGIN]
        return (*before, *during, *(segment for segment in around if segment.activity is not StepPhase.BEGIN))


def _is_alone(activity: Activity, parts: Collection[Activity]) -> bool:
    """Return whether an activity is a forward without a backward: of a skipped micro-batch, which may leave buffers."""
    if not isinstance(activity, Action) or activity.kind is not ActionKind.F:
        return False
    return activity._replace(kind=ActionKind.B) not in parts


def _renamed(activity: Activity, stages: Mapping[int, int], *, first: bool = False) -> Activity:
    """Return what another rank does as an activity of this one's stages; `first`: as if of the first micro-batch."""
    if not isinstance(activity, Action):
        return activity
    number = 0 if first and activity.microbatch is not None else activity.microbatch
    return activity._replace(stage=stages[activity.stage], microbatch=number)


def _stand_ins(found: Mapping[Activity, TapeSegment]) -> dict[tuple[int, ActionKind], TapeSegment]:
    """Return stand-ins, by stage and kind of action, made from the middle micro-batch that was run.

    Memory that the action took, and that is freed in other actions, is freed by the stand-in with its backward (which
    may have two parts). So all the micro-batches that it represents leave as much memory as there was.
    """
    ran: dict[tuple[int, ActionKind], list[tuple[int, Action]]] = defaultdict(list)
    for action in found:
        if isinstance(action, Action) and action.microbatch is not None:
            ran[action.stage, action.kind].append((action.microbatch, action))
    middle = {key: found[sorted(each)[len(each) // 2][1]] for key, each in ran.items()}
    given_back = dict(middle)
    for stage, kind in [key for key in middle if key[1] in (ActionKind.B, ActionKind.W)]:
        last, others = (stage, kind), {ActionKind.I, ActionKind.W} if kind is ActionKind.B else {ActionKind.B}
        left: Counter[tuple[Category, bool]] = Counter()
        parts = (part for key, part in middle.items() if key[0] == stage and key[1] not in others)
        for entry in (entry for part in parts for entry in part.entries):
            if isinstance(entry, MemoryChange):
                left[entry.category, entry.host] += entry.bytes
        if any(left.values()):
            back = tuple(MemoryChange(category, -size, host) for (category, host), size in left.items() if size)
            given_back[last] = TapeSegment(middle[last].activity, (*middle[last].entries, *back))
    return given_back


def rehearse(
    subject: RehearsalSubject, *, plan: Plan | str, ranks: int, device: Device = "cpu", shared: bool = False
) -> Rehearsal:
    """Run a plan on one rank of each kind, as if there were `ranks` ranks with this kind of `device`.

    `shared`: the ranks are processes of one host on its CPUs, which share memory.

    Raises the errors of `parallelize` and a step. PlanError when the plan does not fit the ranks or the model,
    ValueError for a model, an optimizer or an option that cannot work.
    """
    plan = Plan.of(plan)
    plan = plan.resolve(ranks)
    rows = tree.rows(subject.batch)
    if not rows:
        raise ValueError("the batch has no rows; rehearse with a batch of one row or more")
    schedule = schedule_of(plan)
    shares = math.prod(plan.mesh().degree(axis) for axis in plan.row_axes)
    each = -(-rows // (shares * plan.microbatches))
    batch = MetaBatch.of(subject.batch, rows=each * plan.microbatches * shares)
    options = dataclasses.replace(subject.options, example=batch.batch)
    source = shapes_of(subject.model, seed=options.seed)
    check_trains(source.module)
    with explaining_values(), ShapeConstants(batch.values) as constants:
        like, options = _kinds(source, schedule, plan, options, constants)
    counts: list[float] = []
    loss = _counting(subject.loss, counts=counts)
    subject_here = dataclasses.replace(subject, options=options, batch=batch.batch, loss=loss)
    part = TapeRecording(
        subject_here, plan, _representatives(schedule), source, device, StageMessages(like), shared, batch.values
    )
    tapes = part.tapes()
    tokens = round(rows * counts[0]) if counts else _tokens(subject.batch)
    return Rehearsal(plan, rows, tokens, schedule, tapes, device)


def _counting(loss: Loss, *, counts: list[float]) -> Loss:
    """Return the loss, wrapped so that it appends its count for each row to `counts`, if the count is a number."""

    def run(output: Any, batch: Any) -> Any:
        result = loss(output, batch)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Real):
            counts.append(float(result[1]) / tree.rows(batch))
        return result

    return run


def _tokens(batch: Any) -> int:
    """Return the largest possible count of the loss: elements of the first integer tensor, or rows without one."""
    given = (one for one in tree.tensors(batch) if not (one.is_floating_point() or one.is_complex()))
    found = next((one for one in given if one.dtype is not torch.bool), None)
    return tree.rows(batch) if found is None else found.numel()


def _kinds(
    source: ParameterSource, schedule: Schedule, plan: Plan, options: Options, constants: ShapeConstants
) -> tuple[tuple[int, ...], Options]:
    """Return the rank rehearsed for each rank along pp, and options with the parts and the cut that were found."""
    if plan.pp == 1:
        return (0,), options
    forward = wrap_for_rehearsal(options.forward or default_forward, constants=constants)
    shares = math.prod(plan.mesh().degree(axis) for axis in plan.row_axes) * plan.microbatches
    micro = tree.take_rows(options.example, start=0, stop=tree.rows(options.example) // shares)
    try:
        parts = find_parts(source.module, plan=plan, rules=options.tensor_rules) if plan.tp > 1 else {}
    except ValueError:
        return tuple(range(plan.pp)), options  # parallelize refuses it
    options = dataclasses.replace(options, parts=parts)
    request = CutRequest(by=plan.partition, where=options.cut, schedule=schedule, pairs=pairs_of(parts))  # type: ignore[arg-type]
    try:
        cut = cut_for(source.module, stages=schedule.stages, micro=micro, run=forward, request=request)
    except CutError:
        return tuple(range(plan.pp)), options  # parallelize refuses it
    at = tuple(cut.keys[bound] for bound in cut.bounds[1:-1])
    options = dataclasses.replace(options, cut=dataclasses.replace(options.cut, at=at, made=cut))
    ends = bool(plan.sequence_parallel) or plan.tp_mode != "1d"
    return rehearsed_ranks(source.module, cut=cut, schedule=schedule, ends=ends), options


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a plan. Raises PlanError where there is no such schedule."""
    if plan.pp == 1:
        each = range(plan.microbatches)
        return Schedule((tuple(Action(0, kind, index) for index in each for kind in (ActionKind.F, ActionKind.B)),))
    return lower(plan_schedule(plan), gathers=plan.zero == 3)


def _representatives(schedule: Schedule) -> frozenset[int]:
    """Return micro-batches that represent all: the first, a middle and the last one of every kind of action of each
    stage.
    """
    found: dict[tuple[int, ActionKind], list[int]] = defaultdict(list)
    for action in schedule.actions():
        if action.microbatch is not None:
            found[action.stage, action.kind].append(action.microbatch)
    return frozenset(
        index for each in map(sorted, found.values()) for index in (each[0], each[len(each) // 2], each[-1])
    )

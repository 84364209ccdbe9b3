"""Rehearse a plan: run `parallelize` and two steps of the training code on meta tensors, for one rank of each kind.

`RehearsalSubject` has all that `parallelize` gets, except the plan. Of ranks, stages, micro-batches and steps that do
equal work, `rehearse` runs one. docs/simulation.md has a table of them ("What is rehearsed").

A model may read masks, positions and lengths. If it reads other values, as by `x.item()`, it fails, unless the value
follows from sizes or from integers of the batch."""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from meshwise.base import tensor_tree as tree
from meshwise.comm.api.flight_recorder import Activity, FlightRecorder, StepPhase
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.schedule_and_cut import cut_on, cutter, plan_schedule
from meshwise.engine.trainer import Trainer
from meshwise.memory.activation_offload import RehearsedMover
from meshwise.model.deferred_init import ParameterSource, shapes_of
from meshwise.model.find_mixtures import find_mixtures
from meshwise.model.forward import Loss, default_forward
from meshwise.model.meta_tensor_values import ShapeConstants
from meshwise.model.parameter_table import check_trains
from meshwise.optim.build_optimizer import OptimizerClass, needs_of
from meshwise.pipeline.cut.model_cut import ModelCut
from meshwise.pipeline.schedules.named_schedules import naive
from meshwise.pipeline.schedules.schedule_table import Action, ActionKind, Schedule, in_flight, lower
from meshwise.plan import Plan, PlanError
from meshwise.plan.plan_keys import LARGEST_COUNT, Offload
from meshwise.simulate.cost_model import step_traffic
from meshwise.simulate.step_tape import Category, MemoryChange, Tape, TapeSegment, TapeWait
from meshwise.simulate.tape_recorder import (
    KernelChoice,
    OperationMemo,
    OperationRecorder,
    Recorder,
    RehearsalWorld,
    StageMessages,
    optimizer_on,
)
from meshwise.tensor.detect.assign_tp_roles import planned_roles

Device: TypeAlias = Literal["cpu", "cuda"]
"""Kind of device of the ranks that are predicted; the rehearsal itself needs no device."""


@dataclass(frozen=True)
class RehearsalSubject:
    """Training that is rehearsed under one or several plans: the arguments of `parallelize` except the plan."""

    model: nn.Module | Callable[[], nn.Module]
    """Module, which is not changed, or the function that builds it."""
    loss: Loss
    """Function `loss(output, batch)` that returns (sum, count)."""
    batch: Any
    """Global batch like those of the training. Its shapes count, and the values of integer and boolean tensors."""
    optimizer: OptimizerClass = torch.optim.AdamW
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the optimizer."""
    options: Options = field(default_factory=Options)

    @property
    def training(self) -> dict[str, Any]:
        """The loss, the optimizer with its arguments, and the options, as keywords of `parallelize`."""
        return {"loss": self.loss, "optimizer": self.optimizer, "options": self.options, **self.arguments}


LARGEST = 2**24
"""Largest number of elements of a tensor whose values are kept."""


@dataclass(frozen=True)
class MetaBatch:
    """Batch of meta tensors, with the values of its small integer and boolean tensors."""

    batch: Any
    values: tuple[tuple[Tensor, Tensor], ...]
    """Pairs of a meta tensor and its values, as for `ShapeConstants`."""

    @classmethod
    def of(cls, batch: Any, *, rows: int) -> "MetaBatch":
        """Return a batch of meta tensors with `rows` rows; kept values repeat the batch's rows: 0 1 2 3 0 1."""
        values: list[tuple[Tensor, Tensor]] = []

        def stand_in(tensor: Tensor) -> Tensor:
            bare = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
            counts = not (tensor.is_floating_point() or tensor.is_complex())
            dense = type(tensor) is Tensor and not (tensor.is_meta or tensor.is_sparse)
            if counts and dense and len(tensor) > 0 and bare.numel() <= LARGEST:
                values.append((bare, tensor.cpu()[torch.arange(rows) % len(tensor)].contiguous()))
            return bare

        return cls(tree.map_tensors(stand_in, batch), tuple(values))


READS_VALUES = "a rehearsal's tensors have no values, but the model seems to read some"
"""Reason to append to an error if `is_meta_tensor_error` is True for it."""

_NO_VALUES = (
    f"{READS_VALUES}. Only integers and booleans of the batch have values, if the batch has values and is not too "
    "large. Mixtures of experts in transformers read values of their router, but not with "
    "experts_implementation='batched_mm'."
)


def is_meta_tensor_error(error: Exception) -> bool:
    """Return whether the message of an error is about a meta tensor, so the model probably read a value."""
    return re.search(r"(\b|register_)meta\b", str(error), re.IGNORECASE) is not None


@contextlib.contextmanager
def explaining_values() -> Iterator[None]:
    """Add a note about missing values to an error of the block that comes from reading a meta tensor.

    The error is raised again. A TypeError, which torch raises if numpy reads a meta tensor, becomes a RuntimeError."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if not is_meta_tensor_error(error):
            raise
        if isinstance(error, TypeError):
            explained = RuntimeError(str(error))
            explained.add_note(_NO_VALUES)
            raise explained from error
        error.add_note(_NO_VALUES)
        raise


def wrap_for_rehearsal(call: Callable[..., Any], *, constants: ShapeConstants) -> Callable[..., Any]:
    """Return `call`, wrapped to run on meta tensors.

    While it runs, torch's default device is meta, and `constants` gives values that follow from sizes or the batch."""

    def run(*given: Any) -> Any:
        with torch.device("meta"), constants.forward():
            return call(*given)

    return run


@dataclass(frozen=True)
class TapeRecording:
    """Recording of the tapes of a plan's ranks, with the inputs that all ranks share."""

    subject: RehearsalSubject
    plan: Plan
    only: frozenset[int]
    """Micro-batches that run; their segments are copied for the others."""
    source: ParameterSource
    """Model, with parameters on meta."""
    device: Device
    stages: StageMessages
    """Messages between the ranks along pp that are rehearsed."""
    shared: bool
    """True if the ranks are processes of one host and share its memory."""
    values: tuple[tuple[Tensor, Tensor], ...]
    memo: OperationMemo = field(default_factory=dict)

    def tapes(self) -> tuple[Tape, ...]:
        """Rehearse one rank of each kind, each in its own thread, and return the tape of each rank along pp."""
        like = self.stages.rehearsed
        ranks_run = sorted(set(like))
        with ThreadPoolExecutor(len(ranks_run)) as threads:
            tape_of = self.stages.running()(self._tape)  # each thread runs when it is its turn
            futures = {index: threads.submit(tape_of, index) for index in ranks_run}
        failures = [failure for failure in (future.exception() for future in futures.values()) if failure is not None]
        for failure in sorted(failures, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            with explaining_values():
                raise failure
        return tuple(futures[index].result() for index in like)

    def _tape(self, index: int) -> Tape:
        """Return the tape of the first rank with this index along pp."""
        mesh = self.plan.mesh()
        rank = index * (mesh.size // self.plan.pp)
        recorder = Recorder(FlightRecorder())
        world = RehearsalWorld(rank=rank, mesh=mesh, recorder=recorder, stages=self.stages, shared=self.shared)
        constants, options = ShapeConstants(self.values), self.subject.options
        forward = wrap_for_rehearsal(options.forward or default_forward, constants=constants)
        # Other plans run attention below modes, where it is plain operations (`fused_dropout.can_attend`).
        whole = self.plan.recompute in ("none", "full") and not self.plan.budget
        kernels = self.device == "cuda" and self.plan.zero < 3 and whole
        with KernelChoice(self.device, local=self.plan.random == "local", kernels=kernels):
            with constants:
                trainer = parallelize(
                    self.source,
                    _played(self.plan, self.device),
                    loss=wrap_for_rehearsal(self.subject.loss, constants=constants),
                    optimizer=optimizer_on(self.device, optimizer=self.subject.optimizer),
                    world=world,
                    options=dataclasses.replace(options, forward=forward),
                    **self.subject.arguments,
                )
            recorder.segments()
            for tensor in tree.tensors(self.subject.batch):
                recorder.ignore(tensor)  # the batch belongs to the caller, not to the trainer
            _watch(trainer, recorder, on_gpu=self.device == "cuda")
            build = recorder.segments()
            with OperationRecorder(recorder, memo=self.memo), constants:
                if (replicas := trainer.agreements) is not None:  # two steps without an agreement
                    replicas.scheme = dataclasses.replace(replicas.scheme, every=LARGEST_COUNT, after=0, group=0)
                trainer.step(self.subject.batch, only=frozenset({max(self.only)}))
                first = self._run(recorder)
                saved = 0 if trainer.activations is None else trainer.activations.mover.peak
                trainer.step(self.subject.batch, only=self.only)
                steady = _with_gathers_first(self._run(recorder), first=first)
                agreements = tuple(_agreements(trainer, recorder))
        traffic = step_traffic(
            self.plan.tiers,
            sizes={**trainer.tiers.disk_bytes, "activations": saved},
            updated=_updated(trainer),
            microbatches=self.plan.microbatches,
            on_gpu=self.device == "cuda",
        )
        return Tape(index, build[0], first, steady, self._away(trainer, saved=saved), *traffic, agreements)

    def _away(self, trainer: Trainer, *, saved: int) -> Mapping[str, int]:
        """Return the bytes off the device by tier (`cpu`, `disk`). `saved`: offloaded activations per micro-batch."""
        away: Counter[str] = Counter()
        for what, size in trainer.tiers.disk_bytes.items():
            away[getattr(self.plan.tiers, what)] += size
        if saved:
            kept, stages = in_flight(trainer.schedule), trainer.schedule.stages_of(trainer.world.group("pp").index)
            away[self.plan.tiers.activations] += saved * math.ceil(max(kept[stage] for stage in stages))
        if self.device == "cuda":  # staging buffers are pinned memory of the host
            away["cpu"] += trainer.tiers.staged if self.plan.tiers.uses_disk else 0
            tier = trainer.activations
            if self.plan.tiers.activations == "disk" and tier is not None and isinstance(tier.mover, RehearsedMover):
                away["cpu"] += tier.mover.staged
        return +away

    def _run(self, recorder: Recorder) -> tuple[TapeSegment, ...]:
        """Return the segments recorded since the last call, without the forwards of skipped micro-batches."""
        passed = {Action(0, ActionKind.F, index) for index in range(self.plan.microbatches) if index not in self.only}
        return tuple(segment for segment in recorder.segments() if self.plan.pp > 1 or segment.activity not in passed)


def _with_gathers_first(steady: tuple[TapeSegment, ...], *, first: Sequence[TapeSegment]) -> tuple[TapeSegment, ...]:
    """Return a step that begins with the gathers that the step before has started at its end (`overlap_gather`)."""
    waited = {entry.sequence for part in steady for entry in part.entries if isinstance(entry, TapeWait)}
    begun = tuple(call for part in first for call in part.calls() if call.record.sequence in waited)
    if not begun:
        return steady
    left = {call for part in steady for call in part.calls() if call.record.sequence not in waited}
    own = [TapeSegment(part.activity, tuple(one for one in part.entries if one not in left)) for part in steady]
    before = [entry for part in own for entry in part.entries if part.activity is StepPhase.BEGIN]
    begin = TapeSegment(StepPhase.BEGIN, (*begun, *before))
    return (begin, *(part for part in own if part.activity is not StepPhase.BEGIN))


def _agreements(trainer: Trainer, recorder: Recorder) -> Iterator[TapeSegment]:
    """Let replicas agree as in two rounds, without the steps between; yield what follows each kind of step."""
    replicas, scheme = trainer.agreements, trainer.scheme
    if replicas is None or scheme is None:
        return
    replicas.scheme, kinds = dataclasses.replace(scheme, after=0), scheme.kinds_of_steps(replicas=replicas.size)
    before = 0
    for start, (step, times) in itertools.product((0, sum(kinds.values())), kinds.items()):
        replicas.steps = start + step - 1
        replicas.after_step(1.0)
        entries = tuple(entry for part in recorder.segments() for entry in part.entries)
        yield TapeSegment(StepPhase.AGREE, entries, replicas.steps - before, times)
        before = replicas.steps


def _updated(trainer: Trainer) -> Mapping[str, int]:
    """Return the bytes that a rank updates: of `params`, and of their `gradients` in the dtype of the masters."""
    updated: Counter[str] = Counter()
    for bucket in (bucket for unit in trainer.units for bucket in unit.buckets):
        count = bucket.owned[1] - bucket.owned[0]
        updated["params"] += count * bucket.dtype.itemsize
        updated["gradients"] += count * bucket.storage.precision.master_of(bucket.dtype).itemsize
    return updated


def _played(plan: Plan, device: Device) -> Plan:
    """Return the plan to run. For CUDA, the tier `cpu` becomes `disk`: without a GPU, `cpu` would mean the device.

    With pp, parameters are awaited in the step, because each action of the schedule is timed alone."""
    plan = dataclasses.replace(plan, overlap_gather=0) if plan.pp > 1 else plan
    tiers = {what: "disk" if tier == "cpu" else tier for what, tier in dataclasses.asdict(plan.tiers).items()}
    return plan if device == "cpu" else dataclasses.replace(plan, offload=str(Offload(**tiers)))


def _watch(trainer: Trainer, recorder: Recorder, *, on_gpu: bool) -> None:
    """Count the memory that exists before the first step, and watch storages that grow and shrink in a step."""
    for tensor in trainer.tiers.disk_tensors:
        recorder.ignore(tensor)
    staged = functools.partial(recorder.watch, category=Category.STAGING)
    trainer.tiers.on_new_buffer = recorder.ignore if on_gpu else staged  # staging buffers of a GPU are host memory
    if trainer.activations is not None and isinstance(trainer.activations.mover, RehearsedMover):
        trainer.activations.mover.on_new_buffer = trainer.tiers.on_new_buffer
    for bucket in (bucket for unit in trainer.units for bucket in unit.buckets):
        for name, value in vars(bucket).items():
            if isinstance(value, Tensor) and not trainer.tiers.on_disk(value):
                gathered = bucket.is_sharded and value is bucket.whole
                usual = Category.GRADIENTS if name in ("gradient", "reduced") else Category.PARAMETERS
                note = recorder.watch if value is bucket.whole else recorder.record_allocation
                note(value, category=Category.GATHERED if gathered else usual)
        for state in [each for each in bucket.reduction_state.values() if not trainer.tiers.on_disk(each)]:
            recorder.record_allocation(state, category=Category.REDUCTION)
    for buffer in (buffer for module in trainer.modules for buffer in module.buffers()):
        recorder.record_allocation(buffer, category=Category.PARAMETERS)
    for value in tree.tensors(list(trainer.optimizer.state.values())):
        recorder.record_allocation(value, category=Category.OPTIMIZER)


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal: the plan, its schedule, and a tape for every rank along pp."""

    plan: Plan
    """Plan without `auto`: each degree is a number."""
    rows: int
    """Rows of the global batch."""
    tokens: int
    """Count that the loss returns for the global batch, usually the number of tokens."""
    schedule: Schedule
    """Actions of each rank along pp, with transfers, gathers and reductions; for pp=1 only F and B."""
    tapes: tuple[Tape, ...]
    """Tape for each index along pp; ranks of one kind share a tape."""
    device: Device

    @property
    def replicas(self) -> int:
        """Number of ranks with the same index along pp."""
        return self.plan.mesh().size // len(self.tapes)

    @cached_property
    def steps(self) -> list[tuple[TapeSegment, ...]]:
        """Segments of a whole step, after the first one, of each rank along pp, with all micro-batches."""
        return [self._step(tape, index) for index, tape in enumerate(self.tapes)]

    def _step(self, tape: Tape, index: int) -> tuple[TapeSegment, ...]:
        mine, theirs = (self.schedule.stages_of(rank) for rank in (index, tape.index))
        names = dict(zip(theirs, mine, strict=True))
        own = lambda each: each._replace(stage=names[each.stage]) if isinstance(each, Action) else each  # noqa: E731
        found = {own(segment.activity): segment for segment in tape.steady}
        stand_ins = _stand_ins(found)
        during = [
            TapeSegment(action, part.entries)
            for action in self.schedule.rows[index]
            if (part := found.get(action) or stand_ins.get((action.stage, action.kind))) is not None
        ]
        around = [segment for activity, segment in found.items() if not isinstance(activity, Action)]
        before = [segment for segment in around if segment.activity is StepPhase.BEGIN]
        return (*before, *during, *(segment for segment in around if segment.activity is not StepPhase.BEGIN))


def _stand_ins(found: Mapping[Activity, TapeSegment]) -> dict[tuple[int, ActionKind], TapeSegment]:
    """Return the segments that are copied for micro-batches that did not run, by stage and kind of action.

    Each is the segment of the middle micro-batch that ran. If this micro-batch leaves memory allocated, its last
    backward (B or W) is changed to free that memory. So no copied micro-batch changes the memory in total."""
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
    subject: RehearsalSubject,
    *,
    plan: Plan | str,
    ranks: int,
    device: Device = "cpu",
    shared: bool = False,
    rows: int | None = None,
) -> Rehearsal:
    """Run a plan on meta tensors, for one rank of each kind, as if there were `ranks` ranks with this kind of device.

    `shared`: the ranks are processes of one host on its CPUs, which share memory. `rows`: rows of the global batch, for
    which the rows of `subject.batch` are repeated or cut; None for as many as it has. The warm-up of an optimizer that
    exchanges momenta takes one step, so the second step already exchanges them.

    Raises the errors of `parallelize` and of a step that need no values: PlanError if the plan does not fit ranks or
    model, ValueError for a wrong model, optimizer, option or batch. Raises RuntimeError if the model reads values."""
    plan = Plan.of(plan).resolve(ranks, compiles=device == "cuda")
    rows = tree.row_count(subject.batch) if rows is None else rows
    if not rows:
        raise ValueError("the batch has no rows; rehearse with a batch of one row or more")
    schedule = schedule_of(plan)
    shares = plan.row_parts * plan.microbatches
    batch = MetaBatch.of(subject.batch, rows=-(-rows // shares) * shares)
    options = dataclasses.replace(subject.options, example=batch.batch)
    source = shapes_of(subject.model, seed=options.seed)
    check_trains(source.module)
    for name in (name for name, mixture in find_mixtures(source.module).items() if mixture.form == "called"):
        raise PlanError(
            f"{name} calls its experts in a loop over values of its router, and a rehearsal has no values. Measure a "
            "short run instead: meshwise train job.toml --train.steps 5"
        )
    with explaining_values(), ShapeConstants(batch.values) as constants:
        like, options = _kinds(source, schedule, plan, options, constants)
    counts: list[float] = []
    loss = _counting(subject.loss, counts=counts)
    arguments = {**subject.arguments, **({"warmup": 1} if needs_of(subject.optimizer) == "replicas" else {})}
    subject_here = dataclasses.replace(subject, options=options, batch=batch.batch, loss=loss, arguments=arguments)
    part = TapeRecording(
        subject_here, plan, _representatives(schedule), source, device, StageMessages(like), shared, batch.values
    )
    tapes = part.tapes()
    tokens = round(rows * counts[0] * plan.cp) if counts else _tokens(subject.batch)
    return Rehearsal(plan, rows, tokens, schedule, tapes, device)


def _counting(loss: Loss, *, counts: list[float]) -> Loss:
    """Return the loss, wrapped so that each call appends its count per row to `counts` if it is a number."""

    def run(output: Any, batch: Any) -> Any:
        result = loss(output, batch)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Real):
            counts.append(float(result[1]) / tree.row_count(batch))
        return result

    return run


def _tokens(batch: Any) -> int:
    """Return the elements of the batch's first integer tensor, else its rows. Used if the loss returns no count."""
    given = (one for one in tree.tensors(batch) if not (one.is_floating_point() or one.is_complex()))
    found = next((one for one in given if one.dtype is not torch.bool), None)
    return tree.row_count(batch) if found is None else found.numel()


def _kinds(
    source: ParameterSource, schedule: Schedule, plan: Plan, options: Options, constants: ShapeConstants
) -> tuple[tuple[int, ...], Options]:
    """Return the rank rehearsed for each rank along pp, and `options` with the parts and the cut of the model."""
    if plan.pp == 1:
        return (0,), options
    forward = wrap_for_rehearsal(options.forward or default_forward, constants=constants)
    shares = plan.row_parts * plan.microbatches
    micro = tree.take_rows(options.example, start=0, stop=tree.row_count(options.example) // shares)
    try:
        parts = planned_roles(source.module, plan=plan, rules=options.tensor_rules)
        options = dataclasses.replace(options, parts=parts)
        make = cutter(source.module, plan=plan, schedule=schedule, where=options.cut, parts=parts)
        cut = cut_on(micro, make=make, run=forward)
    except ValueError:
        return tuple(range(plan.pp)), options  # parallelize refuses it
    at = tuple(cut.keys[bound] for bound in cut.bounds[1:-1])
    options = dataclasses.replace(options, cut=dataclasses.replace(options.cut, at=at, made=cut))
    ends = bool(plan.sequence_parallel) or plan.tp_mode != "1d"
    return rehearsed_ranks(source.module, cut=cut, schedule=schedule, ends=ends), options


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a plan, with transfers and gathers for pp > 1. Raises PlanError if pp excludes it."""
    if plan.pp == 1:
        return naive(1, microbatches=plan.microbatches)
    return lower(plan_schedule(plan), gathers=plan.zero == 3)


def _representatives(schedule: Schedule) -> frozenset[int]:
    """Return the micro-batches to run: the first, a middle and the last one of each stage and kind of action."""
    found: dict[tuple[int, ActionKind], list[int]] = defaultdict(list)
    for action in schedule.actions():
        if action.microbatch is not None:
            found[action.stage, action.kind].append(action.microbatch)
    return frozenset(index for own in map(sorted, found.values()) for index in (own[0], own[len(own) // 2], own[-1]))


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def rehearsed_ranks(model: nn.Module, *, cut: ModelCut, schedule: Schedule, ends: bool) -> tuple[int, ...]:
    """Return, for each rank along pp, the first rank that does the same work.

    Two stages are equal if they run modules of the same classes with parameters of the same shapes, receive and send
    the same numbers of values, and share no parameter with another stage. The first and last stage equal no other.
    `ends`: True if the first and the last block of a list do more work than the others."""
    kinds = [_kind(model, cut, stage, ends=ends) for stage in range(cut.stages)]
    first: dict[Hashable, int] = {}
    return tuple(  # in a V schedule one rank has two stages in a row
        first.setdefault((any(stage + 1 in own for stage in own), *(kinds[stage] for stage in own)), rank)
        for rank, own in enumerate(map(schedule.stages_of, range(schedule.ranks)))
    )


def _kind(model: nn.Module, cut: ModelCut, stage: int, *, ends: bool) -> Hashable:
    tied = any(stage in stages for stages in cut.ties.values())
    if stage in (0, cut.stages - 1) or tied:
        return stage
    start, stop = cut.bounds[stage : stage + 2]
    return (
        len(cut.sends[stage - 1]),
        len(cut.sends[stage]),
        tuple(shapes_in(model.get_submodule(name)) for name in cut.modules[start:stop]),
        tuple(_end(model, name) for name in cut.modules[start:stop]) if ends else (),
    )


def _end(model: nn.Module, name: str) -> Hashable:
    """Return whether a module is the first, and whether it is the last, of its list; () outside of a list."""
    around, _, own = name.rpartition(".")
    names = list(model.get_submodule(around)._modules)
    return (own == names[0], own == names[-1]) if isinstance(model.get_submodule(around), _LISTS) else ()


def shapes_in(module: nn.Module) -> Hashable:
    """Return the classes in a module and the shapes of its parameters; equal for modules that do the same work."""
    classes = tuple((name, type(one).__qualname__) for name, one in module.named_modules())
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())
    return classes, shapes

"""Profile the pieces of a model: time and memory of each, for lower bounds without a rehearsal.

A trace of a stage depends on how its pieces are computed (tp, recompute, precision) and on the rows of a micro-batch.
It does not depend on dp, on the schedule, on how many micro-batches there are or on where the model is cut. So a model
is rehearsed once for each such key, as a pipeline with one piece a stage; equal pieces run once. The costs of any
stages are sums of these figures.

The figures of a piece are never above its share of a stage. Operations do not wait for their host, copies for messages
are left out, and counts for many rows are scaled to fewer without loss. Its output is not counted as kept memory: where
the next piece is on the same stage, it may not be kept.
"""

import contextlib
import copy
import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from torch import nn

from meshwise.base import tensor_tree as tree
from meshwise.comm.api.stopwatch import StepPhase
from meshwise.engine.cut_agreement import finest_cut
from meshwise.model.deferred_init import ParameterSource
from meshwise.model.forward import default_forward
from meshwise.model.shape_constants import ShapeConstants
from meshwise.pipeline.cut.model_cut import CutOptions, ModelCut
from meshwise.pipeline.cut.partition import CutError
from meshwise.pipeline.schedules.action import ActionKind
from meshwise.plan import Plan
from meshwise.planner.plan_space import rows_shared, splits_backward
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.cost_model import CostModel
from meshwise.simulate.memory_use import memory_of
from meshwise.simulate.meta_batch import MetaBatch, with_rows
from meshwise.simulate.meta_value_errors import wrap_for_rehearsal
from meshwise.simulate.rehearsal import rehearse
from meshwise.simulate.rehearsal_subject import RehearsalSubject
from meshwise.simulate.step_tape import Category, Entry, MemoryChange, TapeCall, TapeOperation, TapeSegment, TapeWait


@dataclass(frozen=True)
class PieceWork:
    """Work of a piece for a micro-batch, forward or backward."""

    seconds: float = 0.0
    """Seconds of its operations, and of waits for collectives."""
    waits: float = 0.0
    """Seconds of waits for collectives."""
    kernels: int = 0
    """Number of operations: the host starts each."""
    keeps: int = 0
    """Bytes of activations that are left when it ends."""
    top: int = 0
    """Peak bytes of activations, beyond those at its begin."""

    def scaled(self, by: float, *, least: float = 0.0) -> "PieceWork":
        """Return the work for `by` (at most 1) times as much data; each operation takes at least `least` seconds."""
        fixed = self.kernels * least
        keeps, top = (int(size * by) for size in (self.keeps, self.top))
        seconds = fixed + (self.seconds - fixed) * by
        return PieceWork(seconds, self.waits * by, self.kernels, keeps, top)


@dataclass(frozen=True)
class ModelPiece:
    """A part of the model that no cut divides."""

    forward: PieceWork

    backward: PieceWork
    """Backward; of a backward in two parts, the part for the piece's input."""
    weight: PieceWork
    """Backward for the weights, where the backward has two parts."""
    states: Mapping[Category, int]
    """Bytes of it on a rank between steps, without sharding over dp."""
    update: float
    """Seconds of updating all of it."""
    sends: int
    """Bytes of a micro-batch's output."""

    def scaled(self, *, rows: float, split: float, least: float) -> "ModelPiece":
        """Return the piece for a fraction of a micro-batch's rows, split over more ranks."""
        works = (self.forward, self.backward, self.weight)
        forward, backward, weight = (work.scaled(rows * split, least=least) for work in works)
        states = {category: int(size * split) for category, size in self.states.items()}
        return ModelPiece(forward, backward, weight, states, self.update * split, int(self.sends * rows * split))


@dataclass(frozen=True)
class ProfileKey:
    """Key of a layer profile: everything that the trace of a piece depends on."""

    plan: Plan
    """Plan with one piece a stage, one micro-batch and no replicas."""
    rows: int
    """Rows of a micro-batch, over all ranks of tp."""

    @classmethod
    def of(cls, plan: Plan, *, batch: int, pieces: int) -> "ProfileKey":
        """Return the profile key of a plan."""
        mine = -(-batch // (rows_shared(plan) * plan.microbatches))
        alone: dict[str, Any] = {
            "dp": 1,
            "pp": pieces,
            "zero": 0,
            "microbatches": 1,
            "virtual_stages": 1,
            "partition": "params",
        }
        activations = plan.tiers.activations
        tiers = "none" if activations == "device" else f"activations:{activations}"
        schedule = "zb-h1" if splits_backward(plan) else "naive"
        own = dataclasses.replace(plan, **alone, schedule=schedule, offload=tiers, wire="auto")
        return cls(own, mine * rows_shared(own))


@dataclass(frozen=True)
class ModelPieces:
    """Pieces of a model, and a smaller model with one of each kind."""

    whole: nn.Module
    """The model."""
    finest: ModelCut
    """Cut of the model with one piece a stage."""
    model: nn.Module
    """The smaller model, which keeps three of many equal blocks."""
    cut: ModelCut
    """Cut of the smaller model."""
    like: tuple[int, ...]
    """For each piece, the equal stage of the smaller model's cut."""

    @property
    def names(self) -> tuple[str, ...]:
        """Name of the first module of each piece, as in `model.cut_at`."""
        return _names(self.finest)

    @property
    def count(self) -> int:
        """Number of pieces."""
        return self.finest.stages

    @classmethod
    def of(cls, subject: RehearsalSubject, *, source: ParameterSource) -> "ModelPieces | None":
        """Return the pieces of a model that has several with parameters, or None for another."""
        whole = _cut(subject, source.module)
        if whole is None:
            return None
        names = _names(whole)
        try:
            thin, renamed = thinned(source.module)
            cut = _cut(subject, thin)
            if cut is not None:
                like = tuple(_names(cut).index(renamed(name)) for name in names)
                if list(whole.parameters) == [cut.parameters[index] for index in like]:
                    return cls(source.module, whole, thin, cut, like)
        except Exception:  # noqa: BLE001, S110 -- a model that does not run with fewer blocks is taken as it is
            pass
        return cls(source.module, whole, source.module, whole, tuple(range(len(names))))

    def stages(self, at: Sequence[str]) -> tuple[range, ...]:
        """Return the pieces of each stage, where every stage but the first begins at one of these names."""
        names = self.names
        bounds = [0, *(names.index(name) for name in at), self.count]
        return tuple(range(start, stop) for start, stop in pairwise(bounds))

    def cut_options(self, at: Sequence[str], *, where: CutOptions) -> CutOptions:
        """Return cut options under which each stage but the first begins at one of these names; they carry the cut."""
        made = self.finest.coarser(at, model=self.whole) if at and set(at) <= set(self.names) else None
        return dataclasses.replace(where, at=tuple(at), made=made)


def thinned(model: nn.Module) -> tuple[nn.Module, Callable[[str], str]]:
    """Return a copy with three of each run of equal children, and the new names of the children."""
    thin = copy.deepcopy(model)
    places: dict[str, list[int]] = {}
    for name, container in model.named_modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            kinds = [_shape(child) for child in container]
            runs = [len(list(run)) for _, run in itertools.groupby(kinds)]
            before = itertools.accumulate((min(run, _KEPT) for run in runs), initial=0)
            places[name] = [
                start + (min(number, 1) if number < run - 1 else min(run, _KEPT) - 1)
                for start, run in zip(before, runs, strict=False)
                for number in range(run)
            ]
    for name, place in sorted(places.items(), reverse=True):  # what is inside first
        container = thin.get_submodule(name)
        kept = {new: container[old] for old, new in reversed(list(enumerate(place)))}  # type: ignore[index]
        children = [kept[new] for new in sorted(kept)]
        made = type(container)(children) if isinstance(container, nn.ModuleList) else type(container)(*children)
        parent, _, own = name.rpartition(".")
        setattr(thin.get_submodule(parent), own, made)

    def renamed(name: str) -> str:
        words = name.split(".")
        for length in range(1, len(words)):
            place = places.get(".".join(name.split(".")[:length]))
            if place is not None and words[length].isdigit():
                words[length] = str(place[int(words[length])])
        return ".".join(words)

    return thin, renamed


_KEPT = 3
"""Equal children that are kept: the first, the last, and one that represents those between."""


def _shape(module: nn.Module) -> Hashable:
    classes = tuple((name, type(one).__qualname__) for name, one in module.named_modules())
    return classes, tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())


def _cut(subject: RehearsalSubject, model: nn.Module) -> ModelCut | None:
    """Return the cut with one piece a stage; None for fewer than two pieces, or if no stage can begin at each."""
    rows = min(2, tree.rows(subject.batch))  # of which what is as large as one row is not
    micro = MetaBatch.of(subject.batch, rows=rows)
    with contextlib.suppress(CutError), ShapeConstants(micro.values) as constants:
        run = wrap_for_rehearsal(subject.options.forward or default_forward, constants=constants)
        return finest_cut(model, micro=micro.batch, run=run, pieces=subject.options.cut.pieces)
    return None


def _names(cut: ModelCut) -> tuple[str, ...]:
    return tuple(cut.keys[start] for start in cut.bounds[:-1])


@dataclass(frozen=True)
class LayerProfile:
    """Costs of all pieces of a model under one profile key."""

    key: ProfileKey
    pieces: tuple[ModelPiece, ...]
    least: float
    """Seconds that any operation takes."""

    def scaled(self, key: ProfileKey) -> "LayerProfile":
        """Return a lower bound for another key: fewer rows, more ranks of tp, or more recomputation."""
        rows, split = key.rows / self.key.rows, self.key.plan.tp / key.plan.tp
        pieces = [piece.scaled(rows=rows, split=split, least=self.least) for piece in self.pieces]
        if key.plan.recompute != self.key.plan.recompute:
            pieces = [
                dataclasses.replace(
                    piece, forward=_without_memory(piece.forward), backward=_without_memory(piece.backward)
                )
                for piece in pieces
            ]
        return LayerProfile(key, tuple(pieces), self.least)


def _without_memory(work: PieceWork) -> PieceWork:
    return dataclasses.replace(work, keeps=0, top=0)


def profile_layers(
    subject: RehearsalSubject, *, pieces: ModelPieces, key: ProfileKey, cluster: Cluster
) -> LayerProfile:
    """Rehearse all pieces under one key. Raises the errors of a rehearsal."""
    cost_model = CostModel(cluster)
    plan = dataclasses.replace(key.plan, pp=pieces.cut.stages)
    batch = with_rows(subject.batch, rows=key.rows)
    where = dataclasses.replace(subject.options.cut, at=_names(pieces.cut)[1:], made=pieces.cut)
    options = dataclasses.replace(subject.options, cut=where, example=batch)
    alone = dataclasses.replace(subject, model=pieces.model, batch=batch, options=options)
    rehearsal = rehearse(alone, plan=plan, ranks=plan.mesh().size, device=cluster.device.kind)  # type: ignore[arg-type]
    memory = memory_of(rehearsal)
    tied = {stage for stages in pieces.cut.ties.values() for stage in sorted(stages)[1:]}
    steps = [rehearsal.step(index) for index in range(plan.pp)]
    many, copies = Counter(pieces.like), Counter(id(tape) for tape in rehearsal.tapes)
    found: list[ModelPiece] = []
    known: dict[int, ModelPiece] = {}
    for index, (tape, step) in enumerate(zip(rehearsal.tapes, steps, strict=True)):
        own = id(tape)
        if own not in known:
            reader = _StepReader(cost_model, glue=_glue(steps, index), alone=copies[own] == many[index] == 1)
            piece = reader.piece(step, rest=memory[index].rest)
            known[own] = dataclasses.replace(piece, states={}, update=0.0) if index in tied else piece
        found.append(known[own])
    return LayerProfile(key, tuple(found[index] for index in pieces.like), cluster.device.kernel)


def _glue(steps: Sequence[Sequence[TapeSegment]], index: int) -> int:
    """Return how many first operations a forward shares with the last stage, or the last stage with the one before."""
    other = len(steps) - 1 if index != len(steps) - 1 else index - 1
    pairs = zip(_forward(steps[index]), _forward(steps[other]), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0].name == pair[1].name, pairs))


def _forward(step: Sequence[TapeSegment]) -> list[TapeOperation]:
    return [
        entry for segment in step if segment.kind is ActionKind.F for entry in segment.entries if _is_operation(entry)
    ]


def _is_operation(entry: Entry) -> TypeGuard[TapeOperation]:
    return isinstance(entry, TapeOperation)


@dataclass(frozen=True)
class _StepReader:
    """Reader of a piece's recorded step.

    glue     so many operations at the begin of a forward are the model's own between its pieces, which every stage does
             once, however many pieces it has
    alone    no other piece is like this one. Its neighbours may decide how it is split, so nothing it moves is counted
    """

    cost_model: CostModel
    glue: int
    alone: bool

    def piece(self, step: Iterable[TapeSegment], *, rest: Mapping[Category, int]) -> ModelPiece:
        """Return the cost of a piece; `rest`: bytes the rank holds between steps."""
        forward = backward = weight = PieceWork()
        update, sends = 0.0, 0
        for segment in step:
            kind = segment.kind
            if kind is ActionKind.F:
                forward = self.work(_after(segment.entries, self.glue))
            elif kind in (ActionKind.B, ActionKind.I):
                backward = self.work(segment.entries)
            elif kind is ActionKind.W:
                weight = self.work(segment.entries)
            elif kind is ActionKind.SEND_F:
                sends += sum(call.record.bytes for call in segment.calls() if call.record.kind == "send")
            elif segment.activity is StepPhase.UPDATE:
                update += sum(self.cost_model.seconds(entry) for entry in segment.entries if _is_operation(entry))
        forward = dataclasses.replace(forward, keeps=max(0, forward.keeps - sends))
        return ModelPiece(forward, backward, weight, rest, update, sends)

    def work(self, entries: Iterable[Entry]) -> PieceWork:
        """Return the work of an action whose host runs ahead of its device."""
        cluster = self.cost_model.cluster
        each = cluster.device.launch if cluster.device.kind == "cpu" else 0.0
        now = waits = 0.0
        kernels = level = top = 0
        free: dict[tuple[str, ...], float] = defaultdict(float)
        ends: dict[int, float] = {}
        for entry in entries:
            if isinstance(entry, TapeOperation):
                now += self.cost_model.seconds(entry) + each
                kernels += 1
            elif isinstance(entry, TapeCall) and not (self.alone or entry.record.point_to_point):
                axes = entry.record.axes
                ends[entry.record.sequence] = free[axes] = max(now, free[axes]) + self.cost_model.collective(entry)
                if not cluster.overlap:
                    now, waits = free[axes], waits + free[axes] - now
            elif isinstance(entry, TapeWait):
                late = max(0.0, ends.get(entry.sequence, 0.0) - now)
                now, waits = now + late, waits + late
            elif isinstance(entry, MemoryChange) and entry.category is Category.ACTIVATIONS and not entry.host:
                level += entry.bytes
                top = max(top, level)
        return PieceWork(now, waits, kernels, level, top)


def _after(entries: Iterable[Entry], count: int) -> Iterator[Entry]:
    """Yield the entries after the first `count` operations."""
    for entry in entries:
        if count <= 0:
            yield entry
        count -= _is_operation(entry)

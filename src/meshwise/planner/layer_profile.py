"""Profile the pieces of a model (embedding, blocks, head): time and memory of each, for lower bounds of many plans.

A piece's operations depend on tp, recompute, precision, split backwards and the rows of a micro-batch: the profile's
key. They do not depend on dp, the order of actions, the number of micro-batches or the cut. So for each key the model
is rehearsed once, as a pipeline with one piece per stage; equal pieces run once. A stage costs the sum of its pieces.

A piece never costs more here than in a stage. Operations do not wait for their host, and copies for messages do not
count. For fewer rows, the costs of many rows are scaled down in proportion. The output does not count as kept memory,
because the next piece may be on the same stage and not keep it."""

import contextlib
import copy
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from torch import nn

from meshwise.base import tensor_tree as tree
from meshwise.comm.api.flight_recorder import StepPhase
from meshwise.engine.schedule_and_cut import cut_on
from meshwise.model.deferred_init import ParameterSource
from meshwise.model.forward import default_forward
from meshwise.model.meta_tensor_values import ShapeConstants
from meshwise.model.parameter_table import joined_units
from meshwise.pipeline.cut.model_cut import CutOptions, ModelCut, cut_pieces
from meshwise.pipeline.cut.probe_result import CutError
from meshwise.pipeline.schedules.schedule_table import ActionKind
from meshwise.plan import Plan
from meshwise.planner.plan_space import NEUTRAL_KEYS, splits_backward
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.cost_model import CostModel, entry_times
from meshwise.simulate.predicted_memory import memory_of
from meshwise.simulate.rehearsal import MetaBatch, RehearsalSubject, rehearse, shapes_in, wrap_for_rehearsal
from meshwise.simulate.step_tape import Category, Entry, MemoryChange, TapeCall, TapeOperation, TapeSegment, TapeWait


@dataclass(frozen=True)
class PieceWork:
    """Cost of one forward or one backward of a piece for a micro-batch."""

    seconds: float = 0.0
    """Seconds of its operations and of waits for collectives."""
    waits: float = 0.0
    """Seconds of waits for collectives."""
    kernels: int = 0
    """Number of operations, each of which the host launches."""
    keeps: int = 0
    """Bytes of activations that are still allocated when the work ends, minus those that it freed."""
    top: int = 0
    """Peak bytes of activations, minus their bytes when the work begins."""

    def scaled(self, by: float, *, least: float = 0.0) -> "PieceWork":
        """Return the cost for `by` times the data (at most 1). Each operation still takes `least` seconds or more."""
        fixed = self.kernels * least
        keeps, top = (int(size * by) for size in (self.keeps, self.top))
        seconds = fixed + (self.seconds - fixed) * by
        return PieceWork(seconds, self.waits * by, self.kernels, keeps, top)


@dataclass(frozen=True)
class ModelPiece:
    """Costs of a piece of the model; no cut divides a piece."""

    forward: PieceWork
    backward: PieceWork
    """Whole backward. If the backward has two parts: the part for the gradient of the piece's input."""
    weight: PieceWork
    """Part of the backward for the weights' gradients; empty if the backward is one part."""
    states: Mapping[Category, int]
    """Bytes of the piece on a rank between steps, by category, without sharding over dp."""
    update: float
    """Seconds in which all its parameters are updated."""
    sends: int
    """Bytes of its output for a micro-batch, sent if a stage ends here."""

    def scaled(self, *, rows: float, split: float, least: float) -> "ModelPiece":
        """Return the costs for a fraction `rows` of the rows and a fraction `split` of the parameters (more tp)."""
        works = (self.forward, self.backward, self.weight)
        forward, backward, weight = (work.scaled(rows * split, least=least) for work in works)
        states = {category: int(size * split) for category, size in self.states.items()}
        return ModelPiece(forward, backward, weight, states, self.update * split, int(self.sends * rows * split))


@dataclass(frozen=True)
class ProfileKey:
    """Key of a layer profile: all settings that change the costs of a piece."""

    plan: Plan
    """Plan with one piece per stage, one micro-batch, and the smallest dp that leaves `ep` as it is."""
    rows: int
    """Rows of a micro-batch, summed over all ranks that divide the rows under `plan`."""

    @classmethod
    def of(cls, plan: Plan, *, batch: int, pieces: int) -> "ProfileKey":
        """Return the profile key of a plan; `batch`: rows of the global batch, `pieces`: pieces of the model."""
        mine = -(-batch // (plan.row_parts * plan.microbatches))
        dp = plan.ep // math.gcd(plan.ep, plan.tp * plan.cp // plan.etp)
        activations = plan.tiers.activations
        tiers = "none" if activations == "device" else f"activations:{activations}"
        schedule = "zb-h1" if splits_backward(plan) else "naive"
        own = dataclasses.replace(plan, **NEUTRAL_KEYS, dp=dp, pp=pieces, schedule=schedule, offload=tiers)
        return cls(own, mine * own.row_parts)


@dataclass(frozen=True)
class ModelPieces:
    """Pieces of a model, and a smaller model with fewer equal blocks, which is rehearsed for the profiles."""

    whole: nn.Module
    finest: ModelCut
    """Cut of the model with one piece per stage."""
    model: nn.Module
    """Smaller model: of each run of equal blocks at most three. The model itself if it has no smaller form."""
    cut: ModelCut
    """Cut of the smaller model with one piece per stage."""
    like: tuple[int, ...]
    """For each piece, the stage of `cut` with an equal piece."""

    @property
    def names(self) -> tuple[str, ...]:
        """Name of the first module of each piece, as used in `model.cut_at` of a job."""
        return _names(self.finest)

    @property
    def count(self) -> int:
        """Number of pieces."""
        return self.finest.stages

    @classmethod
    def of(cls, subject: RehearsalSubject, *, source: ParameterSource) -> "ModelPieces | None":
        """Return the pieces of the model of `source`, or None if it has fewer than two or cannot be cut at each."""
        if (whole := _cut(subject, source.module)) is None:
            return None
        names = _names(whole)
        try:
            thin, renamed = thinned(source.module)
            if (cut := _cut(subject, thin)) is not None:
                like = tuple(_names(cut).index(renamed(name)) for name in names)
                if list(whole.parameters) == [cut.parameters[index] for index in like]:
                    return cls(source.module, whole, thin, cut, like)
        except Exception:  # noqa: BLE001, S110 -- a model that does not run with fewer blocks is used as it is
            pass
        return cls(source.module, whole, source.module, whole, tuple(range(len(names))))

    def stages(self, at: Sequence[str]) -> tuple[range, ...]:
        """Return the range of pieces of each stage; `at`: first piece of each stage except the first stage."""
        names = self.names
        bounds = [0, *(names.index(name) for name in at), self.count]
        return tuple(range(start, stop) for start, stop in pairwise(bounds))

    def cut_options(self, at: Sequence[str], *, where: CutOptions) -> CutOptions:
        """Return `where` with stages that begin at `at`; if these are pieces, also with the finished cut."""
        made = self.finest.coarser(at, model=self.whole) if at and set(at) <= set(self.names) else None
        return dataclasses.replace(where, at=tuple(at), made=made)


def thinned(model: nn.Module) -> tuple[nn.Module, Callable[[str], str]]:
    """Return a copy with at most three of each run of equal blocks, and a function from old to new module names.

    They are the first, the last, and one in place of all blocks between them."""
    thin = copy.deepcopy(model)
    places: dict[str, list[int]] = {}
    for name, container in model.named_modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            runs = [len(list(run)) for _, run in itertools.groupby(map(shapes_in, container))]
            before = itertools.accumulate((min(run, 3) for run in runs), initial=0)
            places[name] = [
                start + (min(number, 1) if number < run - 1 else min(run, 3) - 1)
                for start, run in zip(before, runs, strict=False)
                for number in range(run)
            ]
    for name, place in sorted(places.items(), reverse=True):  # inner containers first
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


def _cut(subject: RehearsalSubject, model: nn.Module) -> ModelCut | None:
    """Return the cut with one piece per stage; None for fewer than two pieces, or if stages cannot begin at each."""
    rows = min(2, tree.row_count(subject.batch))  # with 2 rows, the dim of rows differs from dims of size 1
    micro = MetaBatch.of(subject.batch, rows=rows)
    with contextlib.suppress(CutError), ShapeConstants(micro.values) as constants:
        run = wrap_for_rehearsal(subject.options.forward or default_forward, constants=constants)
        cut = cut_on(micro.batch, make=partial(cut_pieces, model, pieces=subject.options.cut.pieces), run=run)
        return cut if cut.stages > 1 else None
    return None


def _names(cut: ModelCut) -> tuple[str, ...]:
    return tuple(cut.keys[start] for start in cut.bounds[:-1])


@dataclass(frozen=True)
class LayerProfile:
    """Costs of all pieces of a model under one profile key."""

    key: ProfileKey
    pieces: tuple[ModelPiece, ...]
    least: float
    """Minimum seconds of an operation on the device."""

    def scaled(self, key: ProfileKey) -> "LayerProfile":
        """Return lower bounds for `key`, which has at most as many rows, and at least as much cp, tp and recomputation.
        All costs are divided by ep, which splits only the experts: a lower bound for other modules."""
        own, other = self.key.plan, key.plan
        rows = key.rows * own.cp / (self.key.rows * other.cp)
        split = own.tp * own.ep / (other.tp * other.ep)
        pieces = [piece.scaled(rows=rows, split=split, least=self.least) for piece in self.pieces]
        if key.plan.recompute != self.key.plan.recompute:
            bare = partial(dataclasses.replace, keeps=0, top=0)
            pieces = [
                dataclasses.replace(one, forward=bare(one.forward), backward=bare(one.backward)) for one in pieces
            ]
        return LayerProfile(key, tuple(pieces), self.least)


def profile_layers(
    subject: RehearsalSubject, *, pieces: ModelPieces, key: ProfileKey, cluster: Cluster
) -> LayerProfile:
    """Rehearse all pieces under one key and return their costs on `cluster`. Raises the errors of `rehearse`."""
    # Operations do not wait for the host of a GPU.
    device = dataclasses.replace(cluster.device, launch=cluster.device.launch if cluster.device.kind == "cpu" else 0.0)
    cost_model = CostModel(dataclasses.replace(cluster, device=device))
    plan = dataclasses.replace(key.plan, pp=pieces.cut.stages)
    where = dataclasses.replace(subject.options.cut, at=_names(pieces.cut)[1:], made=pieces.cut)
    options = dataclasses.replace(subject.options, cut=where)
    alone = dataclasses.replace(subject, model=pieces.model, options=options)
    kind, ranks = cluster.device.kind, plan.mesh().size
    rehearsal = rehearse(alone, plan=plan, ranks=ranks, device=kind, rows=key.rows)  # type: ignore[arg-type]
    memory = memory_of(rehearsal)
    tied = {stage for stages in pieces.cut.ties.values() for stage in sorted(stages)[1:]}
    steps = [rehearsal.steps[index] for index in range(plan.pp)]
    later = {module.module for unit in joined_units(pieces.whole) for module in unit[1:]}
    joined = {index for index, name in zip(pieces.like, pieces.names, strict=True) if name in later}
    many, copies = Counter(pieces.like), Counter(id(tape) for tape in rehearsal.tapes)
    known: dict[int, ModelPiece] = {}
    for index, tape in enumerate(rehearsal.tapes):
        if id(tape) not in known:
            single = copies[id(tape)] == many[index] == 1
            work = partial(_work, cost_model=cost_model, alone=single, joined=index in joined)
            piece = _piece(steps[index], glue=_glue(steps, index), work=work, cost_model=cost_model)
            more = {"update": 0.0} if index in tied else {"states": memory[index].rest}
            known[id(tape)] = dataclasses.replace(piece, **more)
    found = tuple(known[id(rehearsal.tapes[index])] for index in pieces.like)
    return LayerProfile(key, found, cluster.device.kernel)


def _glue(steps: Sequence[Sequence[TapeSegment]], index: int) -> int:
    """Return how many operations at the start of a stage's forward are equal in another stage's forward."""
    other = len(steps) - 1 if index != len(steps) - 1 else index - 1
    pairs = zip(_forward(steps[index]), _forward(steps[other]), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0].name == pair[1].name, pairs))


def _forward(step: Sequence[TapeSegment]) -> list[TapeOperation]:
    entries = (entry for segment in step if segment.kind is ActionKind.F for entry in segment.entries)
    return [entry for entry in entries if isinstance(entry, TapeOperation)]


def _piece(
    step: Sequence[TapeSegment], *, glue: int, work: Callable[[Iterable[Entry]], PieceWork], cost_model: CostModel
) -> ModelPiece:
    """Return the costs of a piece from its recorded step, without the bytes between steps.

    | glue   number of operations at the start of a forward that belong to no piece; every stage runs them once, so they
    |        do not count
    | work   function that returns the cost of an action's entries"""
    entries = {part.kind: part.entries for part in step}
    messages = [call.record for part in step if part.kind is ActionKind.SEND_F for call in part.calls()]
    sends = sum(record.bytes for record in messages if record.kind == "send")
    updates = (entry for part in step if part.activity is StepPhase.UPDATE for entry in part.entries)
    update = sum(cost_model.seconds(one) for one in updates if isinstance(one, TapeOperation))
    forward = work(_after(entries.get(ActionKind.F, ()), glue))
    forward = dataclasses.replace(forward, keeps=max(0, forward.keeps - sends))
    backward = work(entries.get(ActionKind.B) or entries.get(ActionKind.I, ()))
    return ModelPiece(forward, backward, work(entries.get(ActionKind.W, ())), {}, update, sends)


def _work(entries: Iterable[Entry], *, cost_model: CostModel, alone: bool, joined: bool) -> PieceWork:
    """Return the cost of an action's entries, as if the host always launched operations in time.

    | alone    True if no other piece equals this one; its collectives depend on the neighbours, so they do not count
    | joined   True if an earlier piece may be in the same unit: one operation copies both gradients, counted there"""
    counted = tuple(entry for entry in entries if not (alone and isinstance(entry, TapeCall)))
    now = waits = 0.0
    kernels = level = top = 0
    for _, entry, start, stop in entry_times([TapeSegment(StepPhase.UPDATE, counted)], cost_model=cost_model):
        if isinstance(entry, TapeCall):
            continue
        now = stop
        kernels += isinstance(entry, TapeOperation) and not (joined and entry.name.startswith("_foreach"))
        if isinstance(entry, TapeWait):
            waits += stop - start
        elif isinstance(entry, MemoryChange) and entry.category is Category.ACTIVATIONS and not entry.host:
            level += entry.bytes
            top = max(top, level)
    return PieceWork(now, waits, kernels, level, top)


def _after(entries: Iterable[Entry], count: int) -> Iterator[Entry]:
    for entry in entries:
        if count <= 0:
            yield entry
        count -= isinstance(entry, TapeOperation)

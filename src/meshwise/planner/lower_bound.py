"""Compute lower bounds of a plan's time and memory from the costs of its pieces, without a rehearsal.

Time: rank r waits until the first micro-batch has passed the stages before r. Then it computes all m micro-batches.
After its last backward, the stages before r run theirs. So no order of actions takes less than

    max over ranks r:  Σ forwards before r  +  m · Σ (forward + backward) of r  +  Σ backwards before r

minus the time for r's weight gradients after its last message, at most the last sum. In zero-bubble schedules a rank
ends with weight gradients, so nothing is left of the last sum. With `exact=True`, the schedule's table is timed
instead, which gives a higher bound. The update of the rank's shard is added in both cases.

Memory: the state of a rank between steps, plus the activations that its stages keep at the same time."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch

from meshwise.base.step_timeline import TimelineRow
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.pipeline.schedules.named_schedules import SCHEDULES, make_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.pipeline.schedules.schedule_table import Action, ActionKind, Schedule
from meshwise.plan import Plan
from meshwise.planner.layer_profile import LayerProfile, ModelPiece, PieceWork
from meshwise.planner.plan_space import splits_backward
from meshwise.precision.dtype_policy import precision_of
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.cost_model import CostModel
from meshwise.simulate.rehearsal import schedule_of
from meshwise.simulate.step_tape import Category, TapeCall


@dataclass(frozen=True)
class PlanFigures:
    """Time and memory of a plan: lower bounds, or after a rehearsal the predicted values."""

    seconds: float = 0.0
    memory: int = 0
    """Bytes on the fullest rank, including the memory of libraries."""
    bubble: float = 0.0
    """Seconds of the step in which a rank has nothing to compute because of the pipeline; mean over ranks."""
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the step in which a rank only waits for collectives, by their axes (`dp·cp`); mean over ranks."""

    def parts(self) -> dict[str, float]:
        """Return the seconds of the step by part: `compute`, `bubble`, and `waits for` each set of axes."""
        compute = self.seconds - self.bubble - sum(self.exposed.values())
        waits = {f"waits for {axes}": seconds for axes, seconds in self.exposed.items()}
        return {"compute": compute, "bubble": self.bubble, **waits}


class _Stage:
    """Costs of a stage for one micro-batch: sums over its pieces.

    | states                   bytes of the stage on a rank between steps, by category, without sharding over dp
    | forward                  minimum seconds of a forward
    | backward, weight         minimum seconds of the two parts of a backward; if it has one part, `weight` is 0
    | parts                    seconds of a backward until the input's gradient can be sent, and of the rest
    | whole                    minimum seconds of the forward and the backward
    | busy                     seconds of operations and waits, without launches by the host
    | waits                    seconds in which the stage only waits for collectives
    | keeps                    bytes of activations that are kept from a forward to its backward
    | top_forward, _backward   peak bytes of activations in a forward and in a backward, minus those when it begins"""

    def __init__(self, pieces: Sequence[ModelPiece], *, launch: float) -> None:
        """`launch`: seconds of the host per operation; 0 on a CPU."""
        self.pieces, self.states = pieces, Counter[Category]()
        for piece in pieces:
            self.states.update(piece.states)
        forwards, backwards = [piece.forward for piece in pieces], [piece.backward for piece in pieces]
        works = (forwards, backwards, [piece.weight for piece in pieces])
        busy = [sum(work.seconds for work in each) for each in works]
        launches = [launch * sum(work.kernels for work in each) for each in works]
        self.forward, self.backward, self.weight = map(max, busy, launches)
        self.busy, self.waits = sum(busy), sum(work.waits for each in works for work in each)
        self.keeps = sum(work.keeps for work in forwards)
        self.top_forward, self.top_backward = _top(forwards), _top(backwards[::-1])
        self.whole = self.forward + self.backward + self.weight
        # A backward in one part counts half for each, because a matrix product's two gradients take equally long.
        self.parts = (self.backward, self.weight) if self.weight else (self.backward / 2, self.backward / 2)


def _top(works: Sequence[PieceWork]) -> int:
    before = itertools.accumulate((work.keeps for work in works), initial=0)
    return max((kept + work.top for kept, work in zip(before, works, strict=False)), default=0)


@cache
def _rank_of(schedule: str, pp: int, virtual_stages: int) -> tuple[int, ...]:
    if pp == 1:
        return (0,)
    microbatches, virtual = SCHEDULES[schedule].nearest(pp, microbatches=1, virtual_stages=virtual_stages)
    return make_schedule(schedule, pp=pp, microbatches=microbatches, virtual_stages=virtual).rank_of


def bound(
    plan: Plan, *, profile: LayerProfile, cut: Sequence[range], cluster: Cluster, sums: bool = True, exact: bool = False
) -> PlanFigures:
    """Return lower bounds of a plan's time and memory.

    `cut`: pieces of each stage. `sums`: False if the optimizer exchanges momenta, not gradients. `exact`: time
    the schedule's table (some ms); the profile must have the plan's key."""
    launch = 0.0 if cluster.device.kind == "cpu" else cluster.device.launch
    stages = [_Stage([profile.pieces[index] for index in own], launch=launch) for own in cut]
    holder = _rank_of(plan.schedule, plan.pp, plan.virtual_stages)
    ranks = [[s for s, rank in enumerate(holder) if rank == r] for r in range(plan.pp)]
    shard = _Shard(plan, cluster, sums and not plan.codec)
    held = [[stages[s] for s in own] for own in ranks]
    update = [shard.update(own) + shard.final_gather_seconds(own) for own in held]
    rests = [shard.rests(own) for own in held]
    if exact:
        schedule = schedule_of(plan)
        computed, along = _clocked(schedule, stages, shard)
        peaks = [max(_levels(row, stages, shard), default=0) for row in schedule.rows]
    else:
        computed = along = _least(plan, ranks, stages, shard)
        peaks = [max(stages[s].keeps for s in own) for own in ranks]
    seconds = along + max(update) + cluster.device.step
    busy = plan.microbatches * sum(stage.whole for stage in stages) / plan.pp
    waits = plan.microbatches * sum(stage.waits for stage in stages) / plan.pp
    exposed = {"·".join(plan.tensor_axes) or "ep": waits} if waits else {}
    bubble = max(0.0, computed - busy) if plan.pp > 1 else 0.0
    reduced = along - (computed if plan.pp > 1 else busy)
    if reduced > 0:
        exposed["dp"] = reduced
    memory = max(rest + kept for rest, kept in zip(rests, peaks, strict=True)) + cluster.device.own
    return PlanFigures(seconds, int(memory), bubble, exposed)


def _least(plan: Plan, ranks: Sequence[Sequence[int]], stages: Sequence[_Stage], shard: "_Shard") -> float:
    """Return the least seconds of a step up to its last backward, by the formula at the top of this file."""
    count = plan.microbatches
    if plan.pp == 1:
        return shard.alone(stages[0], along=count * stages[0].whole)
    before = [0.0, *itertools.accumulate(stage.forward for stage in stages)]
    after = [0.0, *itertools.accumulate(0.0 if splits_backward(plan) else stage.parts[0] for stage in stages)]
    return max(
        before[own[0]] + count * sum(stages[s].whole for s in own) + max(0.0, after[own[0]] - stages[own[0]].parts[1])
        for own in ranks
    )


def _clocked(schedule: Schedule, stages: Sequence[_Stage], shard: "_Shard") -> tuple[float, float]:
    """Return the seconds until the end of the schedule's last computation, and until the end of its last reduction."""
    costs = [
        ActionCost(
            forward=stage.forward,
            input=stage.parts[0],
            weight=stage.parts[1],
            link=shard.link(stage, number, schedule.rank_of),
            gather=shard.gather_seconds(stage),
            reduce=shard.reduce(stage) if schedule.ranks > 1 else 0.0,
        )
        for number, stage in enumerate(stages)
    ]
    timeline = clock(schedule, costs=costs)
    computed = max(event.stop for event in timeline.events if event.row is TimelineRow.COMPUTE)
    return computed, timeline.seconds if schedule.ranks > 1 else shard.alone(stages[0], along=timeline.seconds)


def _levels(row: Sequence[Action], stages: Sequence[_Stage], shard: "_Shard") -> Iterator[float]:
    """Yield the peak bytes of a rank in each action of its `row`, minus its state between steps.

    Tensors that a backward in two parts keeps for the weights' gradients do not count."""
    sizes = [(stage.keeps, stage.top_forward, stage.top_backward) for stage in stages]
    gathers = {ActionKind.GATHER: 1, ActionKind.FREE: -1}
    reduces = {action.stage for action in row if action.kind is ActionKind.REDUCE}
    whole: set[int] = set()
    level = 0.0
    for action in row:
        keeps, top_forward, top_backward = sizes[action.stage]
        if action.kind in gathers:
            level += gathers[action.kind] * shard.gathered(stages[action.stage])
        elif action.kind is ActionKind.F:
            yield level + top_forward
            level += keeps
        elif action.kind in (ActionKind.B, ActionKind.I):
            yield level + top_backward
            level -= keeps
        if action.kind in (ActionKind.B, ActionKind.W) and action.stage in reduces - whole:
            whole.add(action.stage)
            level += shard.accumulated(stages[action.stage])
            yield level
        elif action.kind is ActionKind.REDUCE:
            level -= shard.accumulated(stages[action.stage])


@dataclass(frozen=True)
class _Shard:
    """Memory and collectives of stages under the dp, cp and zero of a plan."""

    plan: Plan
    cluster: Cluster
    sums: bool

    def rests(self, stages: Sequence[_Stage]) -> float:
        """Return the bytes on the device of a rank with these stages, between steps."""
        zero, tiers = self.plan.zero, self.plan.tiers
        here = ("device", "cpu") if self.cluster.device.kind == "cpu" else ("device",)
        parameters, gradients, optimizer = (
            float(sum(stage.states.get(category, 0) for stage in stages))
            for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
        )
        used = parameters * self._used
        rows = (  # bytes, tier, True if they are sharded
            (used, tiers.params, zero == 3 or (zero and self.cluster.shared)),
            (parameters - used, tiers.masters, zero),
            (gradients, tiers.gradients, zero >= 2),
            (optimizer, tiers.optimizer, zero),
        )
        return sum(size / (self._shares if sharded else 1) for size, tier, sharded in rows if tier in here)

    def gathered(self, stage: _Stage) -> float:
        """Return the bytes that gathered parameters of a stage add to the rank's shard; 0 with ep or zero < 3."""
        used = stage.states.get(Category.PARAMETERS, 0) * self._used
        resting = 0.0 if self.plan.tiers.params == "disk" else used / self._shares
        return used - resting if self.plan.zero == 3 and self.plan.ep == 1 and not self.cluster.shared else 0.0

    def accumulated(self, stage: _Stage) -> float:
        """Return the bytes that a stage's unreduced gradients add to the rank's shard; 0 with ep or zero < 2."""
        whole = stage.states.get(Category.GRADIENTS, 0)
        return whole * (1 - 1 / self._shares) if self.plan.zero >= 2 and self.plan.ep == 1 else 0.0

    def update(self, stages: Sequence[_Stage]) -> float:
        """Return the seconds in which the device updates the rank's parameters; 0 if the CPU updates."""
        if self.plan.tiers.updates_on_cpu:
            return 0.0
        whole = sum(piece.update for stage in stages for piece in stage.pieces)
        return whole / self._shares if self.plan.zero else whole

    def final_gather_seconds(self, stages: Sequence[_Stage]) -> float:
        """Return the seconds in which updated parameters are gathered at the end of a step (zero 1 and 2), else 0."""
        if self.plan.zero not in (1, 2) or self.cluster.shared or self.plan.overlap_gather:
            return 0.0
        return sum(self._collective("all_gather", stage, 1.0) for stage in stages)

    def gather_seconds(self, stage: _Stage) -> float:
        """Return the seconds of one all-gather of a stage's parameters (zero=3, without `gather` and `hpz`), else 0."""
        less = self.cluster.shared or self.plan.gather != "exact" or self.plan.hpz > 1
        return self._collective("all_gather", stage, 1.0) if self.plan.zero == 3 and not less else 0.0

    def reduce(self, stage: _Stage) -> float:
        """Return the seconds of one reduction of all gradients of a stage; 0 with a codec, a lower bound."""
        if not self.sums:
            return 0.0
        own = self._collective("reduce_scatter" if self.plan.zero else "all_reduce", stage, self._wire)
        return own + self._collective("all_reduce", stage, self._wire / self._shares, outer=True)

    def alone(self, stage: _Stage, *, along: float) -> float:
        """Return the seconds for pp=1 until all gradients are reduced. `along`: seconds of all micro-batches' work.

        If collectives overlap computation, the reduction can begin with the last backward; else its time is added.
        Under zero=3, each forward and each backward gathers parameters (the last piece may still be gathered), and
        gradients are reduced after each backward."""
        count, rest = self.plan.microbatches, _Stage(stage.pieces[:-1], launch=0.0)
        moved = self.reduce(stage)
        if self.plan.zero == 3:
            moved = count * (self.gather_seconds(stage) + self.gather_seconds(rest) + moved)
        if not self.cluster.overlap:
            return max(along, count * stage.busy + moved)
        return max(along, moved, along - stage.backward + self.reduce(stage))

    def _collective(self, kind: str, stage: _Stage, width: float, *, outer: bool = False) -> float:
        """Return the seconds of a collective of `width` times the bytes of a stage's used parameters.

        It joins the ranks that share the state or, with `outer`, replicas of one shard. With ep return 0, a lower
        bound: fewer ranks share the experts, and it is not known which bytes are experts."""
        ranks = self._replicas[:: self._shares] if outer else self._replicas[: self._shares]
        if len(ranks) == 1 or self.plan.ep > 1:
            return 0.0
        size = stage.states.get(Category.PARAMETERS, 0) * self._used * width
        return self._cost_model.collective(TapeCall(CallRecord(0, kind, ("dp",), (), "", int(size), ""), ranks))

    def link(self, stage: _Stage, number: int, rank_of: Sequence[int]) -> float:
        """Return the seconds of a message from stage `number` to the next one; 0 if no other rank has the next one."""
        if number + 1 >= len(rank_of) or rank_of[number] == rank_of[number + 1]:
            return 0.0
        apart = self.plan.mesh().size // self.plan.pp
        ranks = (rank_of[number] * apart, rank_of[number + 1] * apart)
        record = CallRecord(0, "send", ("pp",), (), "", stage.pieces[-1].sends, "")
        return self._cost_model.collective(TapeCall(record, ranks))

    @cached_property
    def _cost_model(self) -> CostModel:
        return CostModel(self.cluster)

    @property
    def _shares(self) -> int:
        """Number of ranks that share one copy of the state."""
        return (self.plan.shards or self.plan.dp or 1) * self.plan.cp

    @cached_property
    def _replicas(self) -> tuple[int, ...]:
        return self.plan.mesh().group(0, axes=["dp", *self.plan.token_axes])

    @cached_property
    def _used(self) -> float:
        """Bytes of the used parameters, as a fraction of the bytes of used parameters and masters."""
        precision = precision_of(self.plan)
        if precision.parameters is None:
            return 1.0
        width, master = precision.parameters.itemsize, precision.master_of(precision.parameters).itemsize
        return width / (width + master)

    @property
    def _wire(self) -> float:
        """Bytes of the reduced gradients, as a fraction of the bytes of used parameters; a lower bound."""
        precision = precision_of(self.plan)
        if precision.reduction is None:
            return 1.0
        return precision.reduction.itemsize / (precision.parameters or torch.float64).itemsize

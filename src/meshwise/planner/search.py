"""Search a plan space for the fastest plans: estimate all plans cheaply, and rehearse only plans that may be best.

A plan gets up to five estimates (`EstimateLevel`), each more exact and more expensive than the last one:

    | 0  counted     from a profile of the model without tensor parallelism, scaled   microseconds
    | 1  scaled      from a profile with the plan's tensor parallelism, scaled        seconds once per profile
    | 2  profiled    from a profile with the plan's own key                           seconds once per profile
    | 3  timed       from the profile of level 2, and the table of the schedule       milliseconds
    | 4  rehearsed   from a rehearsal of the plan                                     seconds

Estimates 0 to 3 are lower bounds. The plan with the lowest time always gets its next estimate. So a rehearsed plan that
is faster than all remaining bounds is the best plan, and the next such plan the second best. All plans that are not
rehearsed by then have lost; their bounds show why. A plan that does not fit is replaced by plans with less memory."""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from meshwise.model.deferred_init import shapes_of
from meshwise.pipeline.cut.partition import PartitionItems, divide
from meshwise.pipeline.schedules.action import Schedule
from meshwise.pipeline.schedules.validate import in_flight
from meshwise.plan import Plan
from meshwise.planner.forked_workers import ForkedWorkers
from meshwise.planner.layer_profile import LayerProfile, ModelPieces, ProfileKey, profile_layers
from meshwise.planner.lower_bound import PlanFigures, bound
from meshwise.planner.plan_space import PlanSpace
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.memory_use import fullest
from meshwise.simulate.meta_value_errors import ASKED, asks_for_values
from meshwise.simulate.prediction import Prediction, predict
from meshwise.simulate.rehearsal import rehearse, schedule_of
from meshwise.simulate.rehearsal_subject import RehearsalSubject
from meshwise.tensor.detect.find_parts import find_parts

UNDIVIDED: Mapping[str, Any] = MappingProxyType(
    {
        "tp": 1, "tp_mode": "1d", "tp_depth": 1, "sequence_parallel": 0, "zero": 0, "shards": 0, "microbatches": 1,
        "schedule": "1f1b", "virtual_stages": 1, "partition": "params", "recompute": "none", "offload": "none",
        "wire": "auto",
    }
)  # fmt: skip
"""Values of keys for the profile of level `COUNTED`, in which the model is cut into stages and no layer is split."""


class EstimateLevel(IntEnum):
    """Exactness of a plan's current estimate; the table at the top of the file has the levels."""

    STARTED = -1
    COUNTED = 0
    SCALED = 1
    PROFILED = 2
    TIMED = 3
    REHEARSED = 4


@dataclass(frozen=True)
class Candidate:
    """Plan with its most exact estimate so far."""

    plan: Plan
    level: EstimateLevel = EstimateLevel.STARTED
    figures: PlanFigures = field(default_factory=PlanFigures)
    """Time and memory of the plan: predicted values after its rehearsal, lower bounds before."""
    at: tuple[str, ...] = ()
    """First module of each stage except the first."""
    refused: str = ""
    """Error message of the training code if it refuses the plan, else ""."""

    @property
    def rehearsed(self) -> bool:
        """True if the plan was rehearsed and not refused."""
        return self.level is EstimateLevel.REHEARSED and not self.refused


@dataclass(frozen=True)
class SearchEffort:
    """Limits of a search."""

    top: int = 10
    """Number of best plans to find."""
    rehearsals: int = 20
    """Maximum number of rehearsed plans."""
    workers: int = 1
    """Number of processes that rehearse at the same time."""


@dataclass
class SearchResult:
    """Result of a search so far: all considered plans with their estimates. It changes during the search."""

    limit: float
    """Bytes that a rank may use."""
    candidates: dict[Plan, Candidate] = field(default_factory=dict)
    """All plans that were considered."""
    proven: int = 0
    """Number of plans, from the start of `best()`, that no plan without a rehearsal can beat."""
    rehearsals: int = 0
    """Number of rehearsals that were started."""
    _rehearsed: dict[Plan, Candidate] = field(default_factory=dict)

    def note(self, candidate: Candidate) -> None:
        """Store the new estimate of a plan; it replaces the earlier one."""
        self.candidates[candidate.plan] = candidate
        if candidate.rehearsed:
            self._rehearsed[candidate.plan] = candidate

    def fits(self, candidate: Candidate) -> bool:
        """Return whether the plan's memory, or its lower bound, is within the limit."""
        return candidate.figures.memory <= self.limit

    def best(self) -> list[Candidate]:
        """Return the rehearsed plans that fit, fastest first, and of equally fast plans the smaller one first."""
        found = [one for one in self._rehearsed.values() if self.fits(one)]
        return sorted(found, key=lambda one: (one.figures.seconds, one.figures.memory, str(one.plan)))


def search(
    subject: RehearsalSubject, *, cluster: Cluster, space: PlanSpace, limit: float, effort: SearchEffort
) -> Iterator[SearchResult]:
    """Search for the fastest plans. After each change and at the end, yield the one result object.

    `limit`: bytes that a rank may use. If no plan fits, plans that offload state are tried too. If the iterator is
    closed, the worker processes end."""
    with PlanSearch(subject, cluster=cluster, space=space, limit=limit, effort=effort) as searching:
        yield from searching.run(tiers=False)
        if not searching.result.best():
            yield from searching.run(tiers=True)
        yield searching.result


class PlanSearch:
    """One search: its queue of candidates, the profiles so far, and the worker processes."""

    evaluate: Callable[[Prediction], PlanFigures]
    """Function from a prediction to the plan's figures; by default `figures_of`. It must never return less time."""

    def __init__(
        self, subject: RehearsalSubject, *, cluster: Cluster, space: PlanSpace, limit: float, effort: SearchEffort
    ) -> None:
        self.result = SearchResult(limit)
        self.evaluate = figures_of
        self._cluster, self._space, self._effort = cluster, space, effort
        self._source = shapes_of(subject.model, seed=subject.options.seed)
        self._subject = dataclasses.replace(subject, model=self._source.module)
        self._pieces = ModelPieces.of(self._subject, source=self._source)
        self._space = dataclasses.replace(space, pieces=self._pieces.count) if self._pieces else space
        self._profiles: dict[ProfileKey, LayerProfile | None] = {}
        self._scaled: dict[tuple[ProfileKey, ProfileKey], LayerProfile] = {}
        rows = dataclasses.replace(space.base, dp=1, **UNDIVIDED)
        self._whole = ProfileKey(dataclasses.replace(rows, pp=self._space.pieces), self._space.most_rows)
        self._asked: dict[ProfileKey, list[Candidate]] = {}
        self._refused: dict[ProfileKey | None, str] = {}
        self._splits: dict[tuple[Any, ...], str] = {}
        self._running: dict[Plan, Candidate] = {}
        self._cuts: dict[Any, tuple[str, ...]] = {}
        self._heap: list[tuple[float, int, int, Candidate]] = []
        self._number = itertools.count()
        self._workers = ForkedWorkers(effort.workers)

    def __enter__(self) -> "PlanSearch":
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()

    def run(self, *, tiers: bool) -> Iterator[SearchResult]:
        """Search all plans of the space; with `tiers`, variants that offload state of the plans that did not fit."""
        if tiers:
            for candidate in [one for one in self.result.candidates.values() if not self.result.fits(one)]:
                self._make_room(candidate, tiers=True)
        else:
            for plan in self._space.plans():
                self._enter(Candidate(plan))
        while self._heap or self._workers.busy:
            self._climb(tiers=tiers)
            if self._is_over() or not self._workers.busy:
                break
            for key, outcome in self._workers.finished():
                self._take(key, outcome, tiers=tiers)
            yield self.result
        self._is_over()
        self._heap.clear()

    def _climb(self, *, tiers: bool) -> None:
        """Give the plans with the lowest time their next estimate, until all workers are busy or the search ends."""
        while self._heap and self._workers.free and self.result.rehearsals < self._effort.rehearsals:
            if self._is_over():
                return
            candidate = heapq.heappop(self._heap)[-1]
            level = EstimateLevel(candidate.level + 1)
            key = self._key(candidate.plan, level)
            last = level is EstimateLevel.REHEARSED
            refused = (self._refused.get(key) or self._unsplit(candidate.plan)) if last else ""
            if refused:
                self._settle(dataclasses.replace(candidate, level=level, refused=refused), tiers=tiers)
            elif last:
                self.result.rehearsals += 1
                self._running[candidate.plan] = candidate
                self._workers.start(candidate.plan, work=functools.partial(self._rehearsed, candidate.plan))
            elif key is None or (key in self._profiles and self._profiles[key] is None):
                self._settle(dataclasses.replace(candidate, level=EstimateLevel.TIMED), tiers=tiers)
            elif key in self._profiles:
                self._settle(self._bounded(candidate, level, self._profiles[key]), tiers=tiers)  # type: ignore[arg-type]
            else:
                self._asked.setdefault(key, []).append(candidate)
                if len(self._asked[key]) == 1:
                    assert self._pieces is not None
                    profiled = functools.partial(profile_layers, self._subject, pieces=self._pieces, key=key)
                    self._workers.start(key, work=functools.partial(profiled, cluster=self._cluster))

    def _take(self, key: Any, outcome: Any, *, tiers: bool) -> None:
        """Use a worker's result: a profile (None if it failed), or the figures or the error of a rehearsal."""
        if isinstance(key, ProfileKey):
            self._profiles[key] = outcome if isinstance(outcome, LayerProfile) else None
            for candidate in self._asked.pop(key):
                self._push(candidate)
            return

        candidate = dataclasses.replace(self._running.pop(key), level=EstimateLevel.REHEARSED)
        if not isinstance(outcome, Exception):
            self._settle(dataclasses.replace(candidate, figures=outcome), tiers=tiers)
        elif isinstance(outcome, ValueError | RuntimeError):  # this model cannot be trained under the plan
            reason = f"{outcome}; {ASKED}" if asks_for_values(outcome) else str(outcome)
            own = self._key(candidate.plan, EstimateLevel.REHEARSED)
            if self._profiles.get(own) is None:  # type: ignore[arg-type]
                self._refused[own] = reason
            self._settle(dataclasses.replace(candidate, refused=reason), tiers=tiers)
        else:
            raise outcome

    def _is_over(self) -> bool:
        """Update `result.proven` and return whether the best `top` plans are proven."""
        left = [self._heap[0][0]] if self._heap else []
        left += [one.figures.seconds for asked in self._asked.values() for one in asked]
        left += [one.figures.seconds for one in self._running.values()]
        sure = [one for one in self.result.best() if one.figures.seconds <= min(left, default=math.inf)]
        self.result.proven = len(sure)
        return len(sure) >= self._effort.top

    # ---- candidates --------------------------------------------------------------------------------------------

    def _enter(self, candidate: Candidate) -> None:
        if candidate.plan not in self.result.candidates:
            self.result.note(candidate)
            self._push(candidate)

    def _push(self, candidate: Candidate) -> None:
        order = (candidate.figures.seconds, -candidate.level, next(self._number), candidate)
        heapq.heappush(self._heap, order)

    def _settle(self, candidate: Candidate, *, tiers: bool) -> None:
        """Store a plan's new estimate. Queue the plan, or if it does not fit, variants with less memory."""
        self.result.note(candidate)
        if not self.result.fits(candidate):
            self._make_room(candidate, tiers=tiers)
        elif candidate.level is not EstimateLevel.REHEARSED:
            self._push(candidate)

    def _make_room(self, candidate: Candidate, *, tiers: bool) -> None:
        for plan in self._space.leaner(candidate.plan, tiers=tiers):
            # A plan with less memory is no faster, except under zero=3, which gathers nothing at the end of the step.
            least = dataclasses.replace(candidate.figures, memory=0)
            self._enter(Candidate(plan, figures=PlanFigures() if plan.zero == 3 != candidate.plan.zero else least))

    # ---- estimates ---------------------------------------------------------------------------------------------

    def _key(self, plan: Plan, level: EstimateLevel) -> ProfileKey | None:
        """Return the key of the profile for a level; None if the model has fewer than two pieces."""
        if self._pieces is None or self._pieces.count < 2:
            return None
        own = ProfileKey.of(plan, batch=self._space.batch, pieces=self._pieces.count)
        if level >= EstimateLevel.PROFILED:
            return own
        plain = {"recompute": "none", "offload": "none", "schedule": "1f1b"}
        if level is EstimateLevel.COUNTED:
            return self._undivided(own)
        return ProfileKey(dataclasses.replace(own.plan, **plain), max(self._space.most_rows, own.rows))  # type: ignore[arg-type]

    def _unsplit(self, plan: Plan) -> str:
        """Return the error if the plan's tensor parallelism cannot split the model, or ""."""
        split = (plan.tp, plan.tp_mode, plan.tp_depth, plan.sequence_parallel)
        if plan.tp > 1 and split not in self._splits:
            self._splits[split] = ""
            try:
                find_parts(self._source.module, plan=plan, rules=self._subject.options.tensor_rules)
            except (ValueError, RuntimeError) as error:
                self._splits[split] = str(error)
        return self._splits.get(split, "")

    def _undivided(self, own: ProfileKey) -> ProfileKey:
        """Return the key for level `COUNTED`, with at least as many rows as `own`: costs scaled up are no bounds."""
        return dataclasses.replace(self._whole, rows=max(self._whole.rows, own.rows))

    def _bounded(self, candidate: Candidate, level: EstimateLevel, profile: LayerProfile) -> Candidate:
        plan, pieces = candidate.plan, self._pieces
        assert pieces is not None
        own, at = ProfileKey.of(plan, batch=self._space.batch, pieces=pieces.count), self._at(plan)
        figures = bound(
            plan,
            profile=self._as(own, profile=profile),
            cut=pieces.stages(at),
            cluster=self._cluster,
            exact=level is EstimateLevel.TIMED,
        )
        before = candidate.figures
        if figures.seconds < before.seconds:
            figures = dataclasses.replace(before, memory=figures.memory)
        memory = max(figures.memory, before.memory)
        return dataclasses.replace(candidate, level=level, at=at, figures=dataclasses.replace(figures, memory=memory))

    def _as(self, key: ProfileKey, *, profile: LayerProfile) -> LayerProfile:
        """Return the profile scaled to `key`; results are kept, because many plans share a profile."""
        if profile.key == key:
            return profile
        if (profile.key, key) not in self._scaled:
            self._scaled[profile.key, key] = profile.scaled(key)
        return self._scaled[profile.key, key]

    def _at(self, plan: Plan) -> tuple[str, ...]:
        """Return the first module of each stage except the first, for stages that are as even as possible."""
        where = self._subject.options.cut.at
        if where or plan.pp == 1 or self._pieces is None:
            return where
        own = ProfileKey.of(plan, batch=self._space.batch, pieces=self._pieces.count)
        whole = self._profiles.get(self._undivided(own)) or self._profiles.get(self._whole)
        if whole is None:
            return where
        number = plan.pp * plan.virtual_stages
        if self._space.begins is not None:
            return self._space.begins(number)
        schedule = None if plan.partition == "time" else schedule_of(plan)
        key = (whole.key, number, schedule and (plan.schedule, plan.microbatches, plan.recompute))
        if key not in self._cuts:
            solid = [True] * len(whole.pieces)
            bounds = divide(
                PartitionItems(_loads(whole, number, schedule), solid, [0.0] * len(whole.pieces)), slack=0.0
            )
            self._cuts[key] = tuple(self._pieces.names[bound] for bound in bounds[1:-1])
        return self._cuts[key]

    def rehearsed(self, plan: Plan) -> Candidate:
        """Rehearse a plan with the cut that the search gives it. Raises the errors of `rehearse`."""
        return Candidate(plan, EstimateLevel.REHEARSED, self._rehearsed(plan), self._at(plan))

    def _rehearsed(self, plan: Plan) -> PlanFigures:
        candidate, subject = Candidate(plan, at=self._at(plan)), self._subject
        if self._pieces is not None:
            where = self._pieces.cut_options(candidate.at, where=subject.options.cut)
            subject = dataclasses.replace(subject, options=dataclasses.replace(subject.options, cut=where))
        return self.evaluate(prediction_of(subject, candidate=candidate, cluster=self._cluster))


def _loads(whole: LayerProfile, stages: int, schedule: Schedule | None) -> list[list[float]]:
    """Return, for each stage, what each piece would cost there: seconds, or with a `schedule` bytes."""
    if schedule is None:
        return [[work.forward.seconds + work.backward.seconds for work in whole.pieces]] * stages
    rests = [float(sum(piece.states.values())) for piece in whole.pieces]
    return [
        [rest + count * piece.forward.keeps for rest, piece in zip(rests, whole.pieces, strict=True)]
        for count in in_flight(schedule)
    ]


def prediction_of(subject: RehearsalSubject, *, candidate: Candidate, cluster: Cluster) -> Prediction:
    """Rehearse a candidate with its cut and return the prediction. Raises the errors of `rehearse`."""
    plan, options = candidate.plan, subject.options
    options = dataclasses.replace(options, cut=dataclasses.replace(options.cut, at=candidate.at))
    if candidate.at:  # the cut is fixed, so no times need to be measured
        plan = dataclasses.replace(plan, partition="params")
    subject = dataclasses.replace(subject, options=options)
    device = cluster.device.kind
    rehearsal = rehearse(subject, plan=plan, ranks=cluster.ranks, device=device, shared=cluster.shared)  # type: ignore[arg-type]
    return predict(rehearsal, cluster=cluster)


def figures_of(prediction: Prediction) -> PlanFigures:
    """Return the time and memory of a prediction as figures of its plan."""
    memory = fullest(prediction.memory).peak.bytes + int(prediction.cluster.device.own)
    idle = prediction.bubble * prediction.seconds
    return PlanFigures(prediction.seconds, memory, idle, dict(prediction.exposed))

"""Search a plan space for the fastest plans: estimate all plans cheaply, and rehearse only plans that may be best.

docs/planner.md has a table of the estimates ("The search"). The plan with the lowest time always gets its next one. So
a rehearsed plan that is faster than all remaining bounds is the best plan, and the next such plan the second best. A
plan that does not fit is replaced by plans with less memory."""

import dataclasses
import functools
import gc
import heapq
import itertools
import math
import multiprocessing
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from meshwise.model.deferred_init import shapes_of
from meshwise.optim.build_optimizer import needs_of
from meshwise.pipeline.cut.stage_balance import PartitionItems, divide
from meshwise.pipeline.schedules.schedule_table import Schedule, in_flight
from meshwise.plan import Plan
from meshwise.planner.layer_profile import LayerProfile, ModelPieces, ProfileKey, profile_layers
from meshwise.planner.lower_bound import PlanFigures, bound
from meshwise.planner.plan_space import UNDIVIDED, PlanSpace
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.predicted_memory import Table, fullest, size_text
from meshwise.simulate.rehearsal import READS_VALUES, RehearsalSubject, is_meta_tensor_error, rehearse, schedule_of
from meshwise.simulate.step_prediction import Prediction, predict
from meshwise.tensor.detect.assign_tp_roles import assign_roles


class EstimateLevel(IntEnum):
    """Exactness of a plan's current estimate, see docs/planner.md; `STARTED`: no estimate yet."""

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
    proven: int = 0
    """Number of plans, from the start of `best()`, that no plan without a rehearsal can beat."""
    rehearsals: int = 0
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
    """Search for the fastest plans. After each change and at the end, yield the same result object.

    `limit`: bytes that a rank may use. If no plan fits, plans that offload state are tried too."""
    with PlanSearch(subject, cluster=cluster, space=space, limit=limit, effort=effort) as searching:
        yield from searching.run(tiers=False)
        if not searching.result.best():
            yield from searching.run(tiers=True)
        yield searching.result


class PlanSearch:
    """One search: its queue of candidates, the profiles so far, and the worker processes."""

    evaluate: Callable[[Prediction], PlanFigures]
    """Function from a prediction to the plan's figures. It must not return less time than `figures_of`, the default."""

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
        self._profiles: dict[ProfileKey | None, LayerProfile | None] = {}
        self._scaled: dict[tuple[ProfileKey, ProfileKey], LayerProfile] = {}
        rows = dataclasses.replace(space.base, dp=1, pp=self._space.pieces, **UNDIVIDED)
        self._whole = ProfileKey(rows, self._space.most_rows)
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
                self._workers.start(candidate.plan, work=functools.partial(self.rehearsed, candidate.plan))
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
        """Use a worker's result: a profile (None if it failed), or the candidate or the error of a rehearsal."""
        if isinstance(key, ProfileKey):
            self._profiles[key] = outcome if isinstance(outcome, LayerProfile) else None
            for candidate in self._asked.pop(key):
                self._push(candidate)
            return

        candidate = dataclasses.replace(self._running.pop(key), level=EstimateLevel.REHEARSED)
        if isinstance(outcome, Candidate):
            self._settle(outcome, tiers=tiers)
        elif isinstance(outcome, ValueError | RuntimeError):  # this model cannot be trained under the plan
            reason = f"{outcome}; {READS_VALUES}" if is_meta_tensor_error(outcome) else str(outcome)
            own = self._key(candidate.plan, EstimateLevel.REHEARSED)
            if self._profiles.get(own) is None:
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
        heapq.heappush(self._heap, (candidate.figures.seconds, -candidate.level, next(self._number), candidate))

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
        if self._pieces is None:
            return None
        own = ProfileKey.of(plan, batch=self._space.batch, pieces=self._pieces.count)
        if level >= EstimateLevel.PROFILED:
            return own
        if level is EstimateLevel.COUNTED:  # with at least as many rows as `own`: costs scaled up are no bounds
            return dataclasses.replace(self._whole, rows=max(self._whole.rows, own.rows))
        plain = dataclasses.replace(own.plan, recompute="none", offload="none", schedule="1f1b")
        return ProfileKey(plain, max(self._space.most_rows, own.rows))

    def _unsplit(self, plan: Plan) -> str:
        """Return the error if the plan's tensor parallelism cannot split the model, or ""."""
        split = (plan.tp, plan.tp_mode, plan.tp_depth, plan.sequence_parallel)
        if plan.tp > 1 and split not in self._splits:
            self._splits[split] = ""
            try:
                assign_roles(self._source.module, plan=plan, rules=self._subject.options.tensor_rules)
            except (ValueError, RuntimeError) as error:
                self._splits[split] = str(error)
        return self._splits.get(split, "")

    def _bounded(self, candidate: Candidate, level: EstimateLevel, profile: LayerProfile) -> Candidate:
        plan, pieces = candidate.plan, self._pieces
        assert pieces is not None
        own, at = ProfileKey.of(plan, batch=self._space.batch, pieces=pieces.count), self._at(plan)
        figures = bound(
            plan,
            profile=self._as(own, profile=profile),
            cut=pieces.stages(at),
            cluster=self._cluster,
            sums=needs_of(self._subject.optimizer) != "replicas",
            exact=level is EstimateLevel.TIMED,
        )
        slower = max(figures, candidate.figures, key=lambda one: one.seconds)
        slower = dataclasses.replace(slower, memory=max(figures.memory, candidate.figures.memory))
        return dataclasses.replace(candidate, level=level, at=at, figures=slower)

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
        whole = self._profiles.get(self._key(plan, EstimateLevel.COUNTED)) or self._profiles.get(self._whole)
        if whole is None:
            return where
        number = plan.pp * plan.virtual_stages
        if self._space.begins is not None:
            return self._space.begins(number)
        schedule = None if plan.partition == "time" else schedule_of(plan)
        key = (whole.key, number, schedule and (plan.schedule, plan.microbatches, plan.recompute))
        if key not in self._cuts:
            solid = [True] * len(whole.pieces)
            bounds = divide(PartitionItems(_loads(whole, number, schedule), solid, [0.0] * len(whole.pieces)))
            self._cuts[key] = tuple(self._pieces.names[bound] for bound in bounds[1:-1])
        return self._cuts[key]

    def rehearsed(self, plan: Plan) -> Candidate:
        """Rehearse a plan with the cut that the search gives it. Raises the errors of `rehearse`."""
        candidate, subject = Candidate(plan, EstimateLevel.REHEARSED, at=self._at(plan)), self._subject
        if self._pieces is not None:
            where = self._pieces.cut_options(candidate.at, where=subject.options.cut)
            subject = dataclasses.replace(subject, options=dataclasses.replace(subject.options, cut=where))
        figures = self.evaluate(prediction_of(subject, candidate=candidate, cluster=self._cluster))
        return dataclasses.replace(candidate, figures=figures)


def _loads(whole: LayerProfile, stages: int, schedule: Schedule | None) -> list[list[float]]:
    """Return, for each stage, what each piece would cost there: seconds, or with a `schedule` bytes."""
    if schedule is None:
        return [[piece.forward.seconds + piece.backward.seconds for piece in whole.pieces]] * stages
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
    return PlanFigures(prediction.seconds, memory, prediction.bubble * prediction.seconds, dict(prediction.exposed))


@dataclass
class ForkedWorkers:
    """Pool of at most `count` children, forked because pickle may refuse a model and the user's functions.

    With a count of 1, `finished` runs the work in this process."""

    count: int
    _running: dict[Any, tuple[Hashable, BaseProcess]] = field(default_factory=dict)
    _waiting: list[tuple[Hashable, Callable[[], Any]]] = field(default_factory=list)

    @property
    def busy(self) -> int:
        """Number of started calls whose results `finished` has not returned yet."""
        return len(self._running) + len(self._waiting)

    @property
    def free(self) -> bool:
        """True if fewer than `count` calls are busy. `start` does not check it."""
        return self.busy < self.count

    def start(self, key: Hashable, *, work: Callable[[], Any]) -> None:
        """Start `work()` in a child; its result, which must be picklable, is returned by `finished` with `key`."""
        if self.count == 1:
            self._waiting.append((key, work))
            return
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, work), daemon=True)
        process.start()
        theirs.close()
        self._running[mine] = key, process

    def finished(self) -> list[tuple[Hashable, Any]]:
        """Wait for at least one started call, and return pairs (key, result) of all finished calls.

        A result is what `work` returned or the exception that it raised; ChildProcessError if the process died."""
        done = [(key, _outcome(work)) for key, work in self._waiting]
        self._waiting.clear()
        ready: list[Any] = list(wait(list(self._running))) if self._running else []
        for connection in ready:
            key, process = self._running.pop(connection)
            try:
                done.append((key, connection.recv()))
            except EOFError:
                process.join()
                done.append((key, ChildProcessError(f"a worker process ended with exit code {process.exitcode}")))
            process.join()
        return done

    def close(self) -> None:
        """Terminate all running children; their results are lost."""
        for _, process in self._running.values():
            process.terminate()
            process.join()
        self._running.clear()


def _child(connection: Connection, work: Callable[[], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends its children
    torch.set_num_threads(1)  # a fork has no threads of the parent, and kernels would wait for them
    gc.disable()  # garbage collection would take a third of the time and free little
    connection.send(_outcome(work))


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 -- the caller of `finished` gets it
        return error


FULL = "out of memory"
"""Reason of plans that need more memory than the limit."""
REFUSED = "refused"
"""First word of the reason of plans that the training code refuses."""
UNTRIED = "not rehearsed: it may still be among the best"
"""Reason of plans that were not rehearsed, and whose lower bound is faster than the table's slowest plan."""


def best_table(result: SearchResult, *, top: int) -> Table:
    """Return the best plans with time, memory, bubble and waits. `?` after a number: the place is not proven."""
    rows: Table = [("", "step", "", "memory", "bubble", "waits", "plan")]
    best = result.best()[:top]
    for number, one in enumerate(best):
        figures, seconds = one.figures, one.figures.seconds
        place = f"{number + 1}{'' if number < result.proven else '?'}"
        more = f"+{100 * (seconds / best[0].figures.seconds - 1):.1f} %" if number else ""
        idle = (f"{100 * part / seconds:.1f} %" for part in (figures.bubble, sum(figures.exposed.values())))
        rows.append((place, f"{seconds:.4g} s", more, size_text(figures.memory), *idle, str(one.plan)))
    return rows


def lost_table(result: SearchResult, *, top: int) -> Table:
    """Return a row for each reason why plans lost: number of plans, least and greatest excess, plan with the least."""
    rows: Table = [("plans", "lost because", "by at least", "", "nearest")]
    for reason, candidates in sorted(_reasons(result, top).items(), key=lambda item: -len(item[1])):
        each = [_excess(one, result, reason) for one in candidates]
        nearest = candidates[each.index(min(each))]
        amount = [size_text(size) if reason == FULL else f"{100 * size:.1f} %" for size in (min(each), max(each))]
        if reason.startswith((REFUSED, UNTRIED)):
            amount = ["", ""]
        to = f"to {amount[1]}" if amount[1] and amount[1] != amount[0] else ""
        rows.append((str(len(candidates)), reason, amount[0], to, str(nearest.plan)))
    return rows


def _reasons(result: SearchResult, top: int) -> Mapping[str, list[Candidate]]:
    """Return the plans that lost, by reason. Refusals that differ only in numbers are one reason."""
    best = result.best()[:top]
    plans = {one.plan for one in best}
    last = best[-1].figures.seconds if best else 0.0
    found: dict[str, list[Candidate]] = defaultdict(list)
    refused: dict[str, list[Candidate]] = defaultdict(list)
    for one in (one for one in result.candidates.values() if one.plan not in plans):
        if one.refused:
            refused[re.sub(r"\d+", "", _unplanned(one))].append(one)
        elif not result.fits(one):
            found[FULL].append(one)
        elif one.level is not EstimateLevel.REHEARSED and one.figures.seconds < last:
            found[UNTRIED].append(one)
        else:
            found[f"slower: {_where(one, best[0])}" if best else UNTRIED].append(one)
    for candidates in refused.values():
        nearest = min(candidates, key=lambda one: _excess(one, result, REFUSED))
        found[f"{REFUSED}: {_unplanned(nearest)}"] = candidates
    return found


def _where(one: Candidate, best: Candidate) -> str:
    """Return the part of the step in which a plan exceeds the best plan by the most seconds."""
    parts, least = one.figures.parts(), best.figures.parts()
    return max(parts, key=lambda part: parts[part] - least.get(part, 0.0))


def _excess(one: Candidate, result: SearchResult, reason: str) -> float:
    """Return the extra time as a fraction of the best time; for `FULL`, or without a best plan, the excess bytes."""
    best = result.best()
    if reason == FULL or not best:
        return one.figures.memory - result.limit
    return one.figures.seconds / best[0].figures.seconds - 1


def _unplanned(one: Candidate) -> str:
    """Return the first sentence of a refusal without the plan's text, so that equal reasons are equal texts."""
    message = re.sub(r"the plan '[^']*' cannot work(?: for this model)?: ", "", one.refused)
    message = re.sub(r"'(?:\w+=[^' ]+ ?)+'", "the plan", message)  # a plan with its own cut differs from `one.plan`
    words = " ".join(word for line in message.splitlines()[:2] for word in line.split())
    return words.split(". ")[0].split("; ")[0]

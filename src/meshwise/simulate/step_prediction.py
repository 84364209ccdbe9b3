"""Predict the time, bubble, waits, traffic and flops of a step from the tapes of all ranks and a cluster.

To play a segment of a tape is to compute the times of its entries (`entry_times`). Without pp, all segments are played
one after the other. With pp, each is played alone. Then the pipeline's clock (`schedule_clock.py`) combines the stages
with their messages, gathers and reductions. `predict` returns the result."""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from meshwise.base.step_timeline import Event, Timeline, TimelineRow
from meshwise.comm.api.flight_recorder import Activity, StepPhase, bus_factor
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock, event_of
from meshwise.pipeline.schedules.schedule_table import COMPUTE, RECEIVES, Action, ActionKind
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.cost_model import CostModel, EntryTime, entry_times, step_seconds
from meshwise.simulate.predicted_memory import RankMemory, fullest, memory_of
from meshwise.simulate.rehearsal import Rehearsal
from meshwise.simulate.step_tape import Category, MemoryChange, TapeCall, TapeOperation, TapeSegment, TapeWait


@dataclass(frozen=True)
class PlayedSegment:
    """Segment with the times of its entries, in seconds since the first of the consecutive segments began."""

    activity: Activity
    start: float = 0.0
    stop: float = 0.0
    times: tuple[EntryTime, ...] = ()
    inside: tuple[tuple[TimelineRow, str, float, float], ...] = ()
    """Row of the timeline, name, start and stop of each collective and wait of the segment."""

    @cached_property
    def waits(self) -> Mapping[str, float]:
        """Seconds in which the rank waits for collectives, by the collectives' axes joined with `·` (`dp·cp`)."""
        total: dict[str, float] = defaultdict(float)
        for stream, call, start, stop in self.inside:
            if stream is TimelineRow.WAIT:
                total[call.split()[-1]] += stop - start
        return total


_MOST_EVENTS = 20_000
"""Largest number of collectives and waits inside actions that a timeline shows. If there are more, each action has only
one wait per set of axes, at the action's end."""


@dataclass(frozen=True)
class MemoryLevel:
    """Memory of a rank on its device at one moment of a step."""

    seconds: float
    """Seconds since the step began."""
    during: str
    """Activity of the rank under its name in the timeline; between activities, `before 0F1`."""
    device: Mapping[Category, int]

    @property
    def bytes(self) -> int:
        """Bytes over all categories."""
        return sum(self.device.values())


@dataclass(frozen=True)
class MemoryHistory:
    """Memory of one rank along pp over the course of a step."""

    index: int
    seconds: float
    levels: tuple[MemoryLevel, ...]
    """For equally long parts of the step, the moment with the most memory; `seconds` is the start of the part."""

    @property
    def peak(self) -> MemoryLevel:
        """Moment of the step with the most memory."""
        return max(self.levels, key=lambda level: level.bytes)


@dataclass(frozen=True)
class _Act:
    """Activity of a rank, with its start and stop in the step. An action lasts the mean time of its kind."""

    activity: Activity
    start: float
    stop: float
    played: PlayedSegment

    def at(self, moment: float) -> float:
        """Convert a time of the played segment to a time in the step, scaled to this activity."""
        own = self.played.stop - self.played.start
        return self.start + (moment - self.played.start) * ((self.stop - self.start) / own if own else 1.0)

    def inside(self, *, rank: int) -> Iterator[Event]:
        """Yield the collectives and waits of this activity."""
        for stream, kind, start, stop in self.played.inside:
            yield Event(rank, stream, kind, self.at(start), self.at(stop))

    def waits(self, *, rank: int) -> Iterator[Event]:
        """Yield one wait per set of axes, at the end of this activity."""
        stop = self.stop
        for axes, seconds in self.played.waits.items():
            start = stop - (self.at(seconds) - self.at(0.0))
            yield Event(rank, TimelineRow.WAIT, axes, start, stop)
            stop = start


@dataclass(frozen=True)
class Prediction:
    """Predicted time, waits, traffic and memory of one step of a plan on a cluster."""

    rehearsal: Rehearsal
    cluster: Cluster
    seconds: float
    """Seconds of a step, without agreements of replicas across steps."""
    agreements: Sequence[tuple[int, float]]
    """For each kind of step of a round: number of its steps, and the most seconds that agreements add to one of them
    on any rank; [(1, 0.0)] under `sync=step`."""
    host_seconds: float
    """Seconds at the end of the step in which every rank waits for offloaded state."""
    traffic: Mapping[str, float]
    """Bytes that one rank sends in a step, the largest number of all ranks: `inside` a node and `between` nodes."""
    agreement_traffic: Mapping[str, float]
    """Bytes that one rank sends in the agreements of a round."""
    clocked: Timeline | None
    """Timeline of the pipeline's actions; None for pp=1."""
    _ranks: "Sequence[_Rank]"

    @property
    def mean_seconds(self) -> float:
        """Seconds of a step on average over a round, with its agreements."""
        steps = sum(times for times, _ in self.agreements)
        return self.seconds + sum(times * added for times, added in self.agreements) / steps

    @property
    def bubble(self) -> float:
        """Fraction of the step in which a rank has nothing to compute because of the pipeline; mean over ranks."""
        return self.timeline.spent["bubble"] / self.seconds

    @property
    def exposed(self) -> Mapping[str, float]:
        """Seconds of the step in which a rank only waits, mean over ranks. The keys are the axes of collectives
        (`dp·cp`), and `host` for offloaded state."""
        start, spent = "waits for ", self.timeline.spent
        return {what.removeprefix(start): seconds for what, seconds in spent.items() if what.startswith(start)}

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Memory of each rank along pp."""
        return memory_of(self.rehearsal)

    @property
    def fits(self) -> bool:
        """True if every rank's peak, with the memory of libraries, is within the device's memory."""
        device = self.cluster.device
        return fullest(self.memory).peak.bytes + device.own <= device.memory

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all ranks; tokens are what the loss counts."""
        return self.rehearsal.tokens / self.mean_seconds

    @property
    def model_flops(self) -> float:
        """Flops of the model in a step over all ranks, without recomputation: at most 3 times the forwards' flops."""
        once = sum(each_flops(self.rehearsal, kinds=tuple(ActionKind)))
        return min(3.0 * sum(each_flops(self.rehearsal, kinds=(ActionKind.F,))), float(once)) * self.rehearsal.replicas

    @property
    def utilisation(self) -> float:
        """Model flops utilisation (MFU): model flops per second, divided by the peak of all ranks."""
        counted: Counter[str] = Counter()
        for segment in self.rehearsal.steps[0]:
            for entry in segment.entries:
                if isinstance(entry, TapeOperation):
                    counted[entry.dtype] += entry.flops
        peak = self.cluster.device.peak_of(counted.most_common(1)[0][0])
        return self.model_flops / (self.mean_seconds * self.rehearsal.plan.mesh().size * peak)

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of all ranks along pp over the whole step, without waits for messages."""
        ranks = range(len(self.rehearsal.tapes))
        events = [event for index in ranks for event in self._outline(index)]
        acts = [(index, act) for index in ranks for act in self._acts[index] if act.stop > act.start]
        every = sum(len(act.played.inside) for _, act in acts) <= _MOST_EVENTS
        for index, act in acts:
            events += act.inside(rank=index) if every else act.waits(rank=index)
        return Timeline(tuple(events), (tuple(ranks),))

    def history(self, index: int, *, columns: int = 360) -> MemoryHistory:
        """Return the memory of the rank with this index along pp, in `columns` equally long parts of the step."""
        seconds, apart = self.seconds, self.rehearsal.device != "cpu"
        current = Counter(self.memory[index].rest)
        levels = [MemoryLevel(0.0, "begin", dict(current))]
        most = total = sum(current.values())
        timed = ((act, time) for act in self._acts[index] for time in act.played.times)
        for act, (_, entry, moment, _) in timed:
            if not isinstance(entry, MemoryChange) or (entry.host and apart):
                continue
            while (start := len(levels) * seconds / columns) <= act.at(moment) and len(levels) < columns:
                during = f"{act.activity}" if start >= act.start else f"before {act.activity}"
                levels.append(MemoryLevel(start, during, dict(current)))
                most = total
            current[entry.category] += entry.bytes
            total += entry.bytes
            if total > most:
                levels[-1] = MemoryLevel(levels[-1].seconds, str(act.activity), dict(current))
                most = total
        end = str(self._acts[index][-1].activity)
        rest = (MemoryLevel(step * seconds / columns, end, dict(current)) for step in range(len(levels), columns))
        return MemoryHistory(index, seconds, (*levels, *rest))

    @cached_property
    def _acts(self) -> list[list[_Act]]:
        """Activities of each rank along pp, in order."""
        clocked = self.clocked
        if clocked is None:
            begin = _Act(StepPhase.BEGIN, 0.0, self._before_actions, PlayedSegment(StepPhase.BEGIN))
            return [[begin, *_acts(self._ranks[0].whole, start=self._before_actions)]]
        return [list(self._scheduled(index, clocked)) for index in range(clocked.ranks)]

    def _outline(self, index: int) -> Iterator[Event]:
        """Yield a rank's activities, the events of the pipeline's clock, and the waits at the end of the step."""
        clocked, before = self.clocked, self._before_actions
        for act in (act for act in self._acts[index] if act.stop > act.start):
            if not isinstance(act.activity, Action):
                yield Event(index, TimelineRow.COLLECTIVE, str(act.activity), act.start, act.stop)
            elif clocked is None:
                yield event_of(act.activity, rank=index, start=act.start, stop=act.stop)
        if clocked is not None:
            for event in (event for event in clocked.events if event.rank == index):
                yield dataclasses.replace(event, start=event.start + before, stop=event.stop + before)
            computed = max(event.stop for events in clocked.computing for event in events)
            axes = "·".join(self.rehearsal.plan.row_axes)
            if computed < clocked.seconds:  # all ranks wait for the last reductions
                yield Event(index, TimelineRow.WAIT, axes, before + computed, before + clocked.seconds)
        if self.host_seconds:
            yield Event(index, TimelineRow.WAIT, "host", self.seconds - self.host_seconds, self.seconds)

    def _scheduled(self, index: int, clocked: Timeline) -> Iterator[_Act]:
        """Yield a rank's activities in order: `begin`, the actions at the times of the clock, the later phases."""
        events = {str(event): event for event in clocked.events if event.rank == index}
        parts, rank = self.rehearsal.steps[index], self._ranks[index]
        before = [rank.alone(part) for part in parts if part.activity is StepPhase.BEGIN]
        yield _Act(StepPhase.BEGIN, 0.0, self._before_actions, *(before or [PlayedSegment(StepPhase.BEGIN)]))
        now = self._before_actions
        for part in (part for part in parts if part.kind is not None):
            kind, event, start = part.kind, events[str(part.activity)], now
            if kind in COMPUTE:
                start = self._before_actions + event.start
            if kind in COMPUTE | RECEIVES:
                now = self._before_actions + event.stop
            yield _Act(part.activity, start, now, rank.alone(part))
        yield from _acts(rank.after, start=self._before_actions + clocked.seconds)

    @cached_property
    def _before_actions(self) -> float:
        """Seconds from the start of the step to its first action."""
        seconds, clocked = self.seconds - self.host_seconds, self.clocked
        if clocked is None:
            return self.cluster.device.step
        return seconds - clocked.seconds - max(part.stop for rank in self._ranks for part in rank.after)


def predict(rehearsal: Rehearsal, *, cluster: Cluster) -> Prediction:
    """Return the prediction for a rehearsed plan on a cluster."""
    ranks, clocked = _ranks(rehearsal, cluster), None
    different = set(ranks)
    sent, agreed = (
        {link: max(one[link] for one in each) for link in ("inside", "between")}
        for each in ([rank.sent() for rank in different], [rank.sent(agreements=True) for rank in different])
    )
    if rehearsal.plan.pp == 1:
        took = ranks[0].whole[-1].stop
    else:
        costs: dict[int, ActionCost] = {}
        for index, rank in enumerate(ranks):
            costs |= dict(zip(rehearsal.schedule.stages_of(index), rank.costs().values(), strict=True))
        clocked = clock(rehearsal.schedule, costs=[costs[stage] for stage in range(rehearsal.schedule.stages)])
        took = clocked.seconds + max(rank.around for rank in different)
    took += cluster.device.step
    on_host = rehearsal.device == "cuda" and rehearsal.plan.tiers.updates_on_cpu
    whole = max(step_seconds(tape, took=took, cluster=cluster, on_host=on_host) for tape in rehearsal.tapes)
    kinds = zip(*(rank.agreements(whole) for rank in different), strict=True)  # the ranks have equal numbers of steps
    added = [max(each) for each in kinds] or [(1, 0.0)]
    return Prediction(rehearsal, cluster, whole, added, whole - took, sent, agreed, clocked, ranks)


def _distinct(parts: Sequence[TapeSegment]) -> list[tuple[TapeSegment, int]]:
    """Return the last of all segments with the same entries, and their number."""
    times = Counter(id(part.entries) for part in parts)
    return [(part, times[key]) for key, part in {id(part.entries): part for part in parts}.items()]


def each_flops(rehearsal: Rehearsal, *, kinds: Collection[ActionKind]) -> list[int]:
    """Return the flops of a step in these kinds of action, without recomputation, for each rank along pp."""
    found: dict[int, int] = {}
    for index in {tape.index for tape in rehearsal.tapes}:
        parts = [part for part in rehearsal.steps[index] if part.kind in kinds]
        found[index] = sum(
            times * entry.flops
            for part, times in _distinct(parts)
            for entry in part.entries
            # No operation repeats in a forward.
            if isinstance(entry, TapeOperation) and (part.kind is ActionKind.F or not entry.recomputed)
        )
    return [found[tape.index] for tape in rehearsal.tapes]


def _ranks(rehearsal: Rehearsal, cluster: Cluster) -> list["_Rank"]:
    """Return the ranks along pp. Ranks with the same tape and the same number in their node are one object."""
    cost_model, each = CostModel(cluster), rehearsal.replicas
    made: dict[tuple[int, int], _Rank] = {}
    found = []
    for index, tape in enumerate(rehearsal.tapes):
        key = tape.index, index * each % cluster.ranks_per_node
        if key not in made:
            shifted = dataclasses.replace(cost_model, shift=(index - tape.index) * each)
            made[key] = _Rank(rehearsal.steps[index], shifted, tape.agreements)
        found.append(made[key])
    return found


class _Rank:
    """One rank along pp, with the times of its segments; equal segments are played once."""

    def __init__(self, parts: Sequence[TapeSegment], cost_model: CostModel, rounds: Sequence[TapeSegment]) -> None:
        self.cost_model, self._parts, self._rounds = cost_model, parts, rounds
        self._around = [part for part in parts if part.kind is None]
        actions = ((part.activity, part, times) for part, times in _distinct(parts))
        self._actions = [(one, part, times) for one, part, times in actions if isinstance(one, Action)]
        self._alone: dict[int, PlayedSegment] = {}

    def play(self, segments: Iterable[TapeSegment]) -> Iterator[PlayedSegment]:
        """Yield consecutive segments with their times, without messages between stages, which the clock adds."""
        calls: dict[int, str] = {}
        now = 0.0
        timed = entry_times(segments, cost_model=self.cost_model)
        for _, each in itertools.groupby(timed, key=lambda time: id(time.segment)):
            start, own = now, tuple(each)
            inside = []
            for _, entry, begin, end in own:
                if isinstance(entry, TapeCall):
                    calls[entry.record.sequence] = f"{entry.record.kind} {'·'.join(entry.record.axes)}"
                    inside.append((TimelineRow.COLLECTIVE, calls[entry.record.sequence], begin, end))
                    continue
                now = end
                if isinstance(entry, TapeWait) and end > begin:
                    inside.append((TimelineRow.WAIT, calls[entry.sequence], begin, end))
            yield PlayedSegment(own[0].segment.activity, start, now, own, tuple(inside))

    def alone(self, part: TapeSegment) -> PlayedSegment:
        """Return one segment of the step with its times."""
        key = id(part.entries)
        if key not in self._alone:
            self._alone[key] = next(self.play([part]), PlayedSegment(part.activity))
        return self._alone[key]

    @cached_property
    def whole(self) -> tuple[PlayedSegment, ...]:
        """All segments of the step, one after the other."""
        return tuple(self.play(self._parts))

    @cached_property
    def after(self) -> tuple[PlayedSegment, ...]:
        """Phases of the step after the schedule's actions."""
        return tuple(self.play(part for part in self._around if part.activity is not StepPhase.BEGIN))

    @cached_property
    def around(self) -> float:
        """Seconds of the phases before and after the schedule's actions."""
        return max((part.stop for part in self.play(self._around)), default=0.0)

    def costs(self) -> dict[int, ActionCost]:
        """Return the mean seconds of each kind of action, by stage of this rank, ascending."""
        found: dict[int, dict[ActionKind, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
        for action, part, times in self._actions:
            calls = map(self.cost_model.collective, part.calls())
            took = self.alone(part).stop if action.kind in COMPUTE else sum(calls)
            found[action.stage][action.kind].append((took, times))
        costs: dict[int, ActionCost] = {}
        for stage, kinds in sorted(found.items()):
            mean = defaultdict(float, {kind: fmean(*zip(*each, strict=True)) for kind, each in kinds.items()})
            work = (mean[ActionKind.F], mean[ActionKind.I], mean[ActionKind.W], mean.get(ActionKind.B))
            link = mean[ActionKind.SEND_F] or mean[ActionKind.RECV_B]
            costs[stage] = ActionCost(*work, link, mean[ActionKind.GATHER], mean[ActionKind.REDUCE])
        return costs

    def agreements(self, seconds: float) -> list[tuple[int, float]]:
        """Return the number of steps of each kind in the second of two rounds, and what an agreement adds to each.

        The first round begins without any exchange. seconds: of a step without an agreement."""
        timed = entry_times(self._rounds, cost_model=self.cost_model, step=seconds)
        stops = {id(part): stop for part, entry, _, stop in timed if not isinstance(entry, TapeCall)}
        found, now = [], 0.0
        for part in self._rounds:
            before, now = now + part.steps * seconds, stops.get(id(part), now + part.steps * seconds)
            found.append((part.times, now - before))
        return found[len(found) // 2 :]

    def sent(self, *, agreements: bool = False) -> dict[str, float]:
        """Return the bytes that this rank sends in a step, or in the agreements of a round, by the kind of link."""
        found = {"inside": 0.0, "between": 0.0}
        counted = [(part, 1) for part in self._around] + [(part, times) for _, part, times in self._actions]
        last_round = ((part, part.times) for part in self._rounds[len(self._rounds) // 2 :])
        for part, times in last_round if agreements else counted:
            for call in part.calls():
                if call.record.kind != "recv":
                    size = times * call.record.bytes * bus_factor(call.record.kind, ranks=len(call.ranks))
                    leaving = self.cost_model.leaving(call.record.kind, ranks=call.ranks)
                    found["between"] += size * leaving
                    found["inside"] += size * (1 - leaving)
        return found


def _acts(parts: Iterable[PlayedSegment], *, start: float) -> Iterator[_Act]:
    """Yield played segments as activities; the first segment begins at `start`."""
    return (_Act(part.activity, start + part.start, start + part.stop, part) for part in parts)

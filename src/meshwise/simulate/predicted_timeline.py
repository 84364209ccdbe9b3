"""Compute the timeline of a predicted step, and each rank's memory over the step, for drawings.

The pipeline's clock gives the start and stop of each action. This file adds the collectives and waits inside actions,
the phases before and after the schedule, and the memory changes of the tape:

    │ begin │ 0F0 │ 0F1 │      │   0B0   │   0B1   │ exchange │ update │
              ▔▔     ▔▔           ▔  ▔      ▔  ▔                ▔▔▔▔▔     waits for collectives"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from meshwise.base.timeline import Event, Timeline, TimelineRow
from meshwise.comm.api.stopwatch import Activity, StepPhase
from meshwise.pipeline.schedules.schedule_clock import event_of
from meshwise.pipeline.schedules.schedule_table import COMPUTE, RECEIVES, Action
from meshwise.simulate.cost_model import CostModel, EntryTime, entry_times
from meshwise.simulate.prediction import Prediction
from meshwise.simulate.step_tape import Category, MemoryChange, TapeCall, TapeSegment, TapeWait

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
    """Bytes by category."""

    @property
    def bytes(self) -> int:
        """Bytes over all categories."""
        return sum(self.device.values())


@dataclass(frozen=True)
class MemoryHistory:
    """Memory of one rank along pp over the course of a step."""

    index: int
    seconds: float
    """Seconds of the step."""
    levels: tuple[MemoryLevel, ...]
    """For equally long parts of the step, the moment with the most memory; `seconds` is the start of the part."""

    @property
    def peak(self) -> MemoryLevel:
        """Moment of the step with the most memory."""
        return max(self.levels, key=lambda level: level.bytes)

    def holds(self, category: Category) -> bool:
        """Return whether the rank has memory of this category at any moment."""
        return any(level.device.get(category) for level in self.levels)


@dataclass(frozen=True)
class _Played:
    """Segment with the times of its entries, in seconds since the first of the consecutive segments began."""

    activity: Activity
    start: float
    stop: float
    times: tuple[EntryTime, ...]
    inside: tuple[tuple[TimelineRow, str, float, float], ...]
    """Row of the timeline, name, start and stop of each collective and wait of the segment."""

    @cached_property
    def waits(self) -> Mapping[str, float]:
        """Seconds in which the rank waits for collectives, by axes."""
        total: dict[str, float] = defaultdict(float)
        for stream, call, start, stop in self.inside:
            if stream is TimelineRow.WAIT:
                total[call.split()[-1]] += stop - start
        return total


def _play(segments: Iterable[TapeSegment], *, cost_model: CostModel) -> Iterator[_Played]:
    """Yield consecutive segments of a rank with their times."""
    calls: dict[int, str] = {}
    now = 0.0
    for _, each in itertools.groupby(entry_times(segments, cost_model=cost_model), key=lambda time: id(time.segment)):
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
        yield _Played(own[0].segment.activity, start, now, own, tuple(inside))


@dataclass(frozen=True)
class _Act:
    """Activity of a rank, with its start and stop in the step. An action lasts the mean time of its kind."""

    activity: Activity
    start: float
    stop: float
    played: _Played | None = None

    def at(self, moment: float) -> float:
        """Convert a time of the played segment to a time in the step, scaled to this activity."""
        assert self.played is not None
        own = self.played.stop - self.played.start
        return self.start + (moment - self.played.start) * ((self.stop - self.start) / own if own else 1.0)

    def inside(self, *, rank: int) -> Iterator[Event]:
        """Yield the collectives and waits of this activity."""
        for stream, kind, start, stop in self.played.inside if self.played else ():
            yield Event(rank, stream, kind, self.at(start), self.at(stop))

    def waits(self, *, rank: int) -> Iterator[Event]:
        """Yield one wait per set of axes, at the end of this activity."""
        stop = self.stop
        for axes, seconds in self.played.waits.items() if self.played else ():
            start = stop - (self.at(seconds) - self.at(0.0))
            yield Event(rank, TimelineRow.WAIT, axes, start, stop)
            stop = start


class PredictionReplay:
    """Timeline of a predicted step, and the memory of its ranks over time."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self._rehearsal = prediction.rehearsal
        self._cost_models: dict[tuple[int, int], CostModel] = {}
        self._alone: dict[tuple[int, int], _Played | None] = {}

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of all ranks along pp over the whole step, without waits for messages."""
        ranks = range(len(self._rehearsal.tapes))
        events = [event for index in ranks for event in self._outline(index)]
        acts = [(index, act) for index in ranks for act in self._acts[index] if act.stop > act.start]
        every = sum(len(act.played.inside) for _, act in acts if act.played) <= _MOST_EVENTS
        for index, act in acts:
            events += act.inside(rank=index) if every else act.waits(rank=index)
        return Timeline(tuple(events), (tuple(ranks),))

    def history(self, index: int, *, columns: int = 360) -> MemoryHistory:
        """Return the memory of the rank with this index along pp, in `columns` equally long parts of the step."""
        seconds, apart = self.prediction.seconds, self._rehearsal.device != "cpu"
        current = Counter(self.prediction.memory[index].rest)
        levels = [MemoryLevel(0.0, "begin", dict(current))]
        most = total = sum(current.values())
        for act, time, entry in self._changes(index):
            if entry.host and apart:
                continue
            while (start := len(levels) * seconds / columns) <= time and len(levels) < columns:
                levels.append(
                    MemoryLevel(
                        start, f"{act.activity}" if start >= act.start else f"before {act.activity}", dict(current)
                    )
                )
                most = total
            current[entry.category] += entry.bytes
            total += entry.bytes
            if total > most:
                levels[-1] = MemoryLevel(levels[-1].seconds, str(act.activity), dict(current))
                most = total
        end = str(self._acts[index][-1].activity)
        rest = (MemoryLevel(step * seconds / columns, end, dict(current)) for step in range(len(levels), columns))
        return MemoryHistory(index, seconds, (*levels, *rest))

    def _changes(self, index: int) -> Iterator[tuple[_Act, float, MemoryChange]]:
        """Yield a rank's memory changes in order, each with its activity and its time in the step."""
        for act in self._acts[index]:
            for _, entry, time, _ in act.played.times if act.played else ():
                if isinstance(entry, MemoryChange):
                    yield act, act.at(time), entry

    @cached_property
    def _acts(self) -> list[list[_Act]]:
        """Activities of each rank along pp, in order."""
        row = self.prediction.timeline
        if row is None:
            parts = _play(self._rehearsal.step(0), cost_model=self._cost_model_of(0))
            return [[_Act(StepPhase.BEGIN, 0.0, self._free), *_acts(parts, start=self._free)]]
        return [list(self._scheduled(index, row)) for index in range(row.ranks)]

    def _outline(self, index: int) -> Iterator[Event]:
        """Yield a rank's activities, the events of the pipeline's clock, and the waits at the end of the step."""
        row = self.prediction.timeline
        for act in (act for act in self._acts[index] if act.stop > act.start):
            if not isinstance(act.activity, Action):
                yield Event(index, TimelineRow.COLLECTIVE, str(act.activity), act.start, act.stop)
            elif row is None:
                yield event_of(act.activity, rank=index, start=act.start, stop=act.stop)
        if row is not None:
            for event in (event for event in row.events if event.rank == index):
                yield replace(event, start=event.start + self._free, stop=event.stop + self._free)
            computed = max(event.stop for events in row.computing for event in events)
            axes = "·".join(self._rehearsal.plan.row_axes)
            if computed < row.seconds:  # all ranks wait for the last reductions
                yield Event(index, TimelineRow.WAIT, axes, self._free + computed, self._free + row.seconds)
        if self._host:
            yield Event(index, TimelineRow.WAIT, "host", self.prediction.seconds - self._host, self.prediction.seconds)

    def _scheduled(self, index: int, row: Timeline) -> Iterator[_Act]:
        """Yield a rank's activities in order: `begin`, the actions at the times of the clock, the later phases."""
        clocked = {str(event): event for event in row.events if event.rank == index}
        parts = self._rehearsal.step(index)
        before = [part for part in parts if part.activity is StepPhase.BEGIN]
        yield _Act(StepPhase.BEGIN, 0.0, self._free, self._played(before[0], index) if before else None)
        now = self._free
        for part in (part for part in parts if part.kind is not None):
            kind, event, start = part.kind, clocked[str(part.activity)], now
            if kind in COMPUTE:
                start = self._free + event.start
            if kind in COMPUTE | RECEIVES:
                now = self._free + event.stop
            yield _Act(part.activity, start, now, self._played(part, index))
        yield from _acts(self._after(index), start=self._free + row.seconds)

    @cached_property
    def _free(self) -> float:
        """Seconds of the step before the first action."""
        seconds, row = self.prediction.seconds - self._host, self.prediction.timeline
        if row is None:
            return self.prediction.cluster.device.step
        return seconds - row.seconds - max(part.stop for index in range(row.ranks) for part in self._after(index))

    @property
    def _host(self) -> float:
        """Seconds in which every rank waits for offloaded state; the timeline shows them at the end of the step."""
        return self.prediction.exposed.get("host", 0.0)

    def _after(self, index: int) -> Iterator[_Played]:
        """Yield the phases of the step after the actions, with their times."""
        parts = self._rehearsal.step(index)
        after = (part for part in parts if part.kind is None and part.activity is not StepPhase.BEGIN)
        return _play(after, cost_model=self._cost_model_of(index))

    def _played(self, segment: TapeSegment, index: int) -> _Played | None:
        """Return one segment with its times; None if it has no entries."""
        cost_model = self._cost_model_of(index)
        key = id(segment.entries), id(cost_model)
        if key not in self._alone:
            self._alone[key] = next(_play([segment], cost_model=cost_model), None)
        return self._alone[key]

    def _cost_model_of(self, index: int) -> CostModel:
        """Return the cost model of a rank, one for each pair of a rehearsed rank and a place in a node."""
        tape, cluster = self._rehearsal.tapes[index].index, self.prediction.cluster
        each = self._rehearsal.plan.mesh().size // len(self._rehearsal.tapes)
        key = tape, index * each % cluster.ranks_per_node
        return self._cost_models.setdefault(key, CostModel(cluster, shift=(index - tape) * each))


def _acts(parts: Iterable[_Played], *, start: float) -> Iterator[_Act]:
    """Yield played segments as activities; the first segment begins at `start`."""
    return (_Act(part.activity, start + part.start, start + part.stop, part) for part in parts)

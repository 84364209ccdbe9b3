"""Lay out a predicted step moment by moment: the activity of each rank and its memory.

The pipeline's clock gives the begin and end of each action. This file adds the collectives and waits inside actions,
the time before and after the schedule, and the memory of the tape:

    │ begin │ 0F0 │ 0F1 │      │   0B0   │   0B1   │ exchange │ update │
              ▔▔     ▔▔           ▔  ▔      ▔  ▔                ▔▔▔▔▔     what it waits for within
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from meshwise.base.timeline import Event, Timeline, TimelineRow
from meshwise.comm.api.stopwatch import Activity, StepPhase
from meshwise.pipeline.schedules.action import COMPUTE, RECEIVES, Action
from meshwise.pipeline.schedules.schedule_clock import event_of
from meshwise.simulate.cost_model import CostModel
from meshwise.simulate.prediction import Prediction
from meshwise.simulate.segment_times import EntryTime, entry_times
from meshwise.simulate.step_tape import Category, MemoryChange, TapeCall, TapeSegment, TapeWait

_MOST_EVENTS = 20_000
"""Collectives and waits within actions that a timeline shows. Where there would be more, what an action waits for along
the same axes is one wait, at its end."""


@dataclass(frozen=True)
class MemoryLevel:
    """Memory of a rank at one moment."""

    seconds: float
    during: str
    """Activity of the rank, as its timeline names it."""
    device: Mapping[Category, int]
    """Bytes of each category on the device."""

    @property
    def bytes(self) -> int:
        """Bytes in total."""
        return sum(self.device.values())


@dataclass(frozen=True)
class MemoryHistory:
    """Memory of one rank along pp over a step."""

    index: int
    seconds: float
    """Of the step."""
    levels: tuple[MemoryLevel, ...]
    """The moment with the most memory in each of equally long parts of the step; its `seconds` are the part's begin."""

    @property
    def peak(self) -> MemoryLevel:
        """Moment with the most memory."""
        return max(self.levels, key=lambda level: level.bytes)

    def holds(self, category: Category) -> bool:
        """Return whether the rank ever has memory of a category."""
        return any(level.device.get(category) for level in self.levels)


@dataclass(frozen=True)
class _Played:
    """Segment with its times, played after the segments before it."""

    activity: Activity
    start: float
    stop: float
    times: tuple[EntryTime, ...]
    inside: tuple[tuple[TimelineRow, str, float, float], ...]
    """Row, name, start and stop of its collectives and of its waits."""

    @cached_property
    def waits(self) -> Mapping[str, float]:
        """Seconds that the rank waits for collectives, by axes."""
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
    """Activity of a rank with its place in the step; the clock gives an action the mean time of its kind."""

    activity: Activity
    start: float
    stop: float
    played: _Played | None = None

    def at(self, moment: float) -> float:
        """Return the time in the step at a moment of the played segment."""
        assert self.played is not None
        own = self.played.stop - self.played.start
        return self.start + (moment - self.played.start) * ((self.stop - self.start) / own if own else 1.0)

    def inside(self, *, rank: int) -> Iterator[Event]:
        """Yield its collectives and waits."""
        for stream, kind, start, stop in self.played.inside if self.played else ():
            yield Event(rank, stream, kind, self.at(start), self.at(stop))

    def waits(self, *, rank: int) -> Iterator[Event]:
        """Yield its waits, placed at its end."""
        stop = self.stop
        for axes, seconds in self.played.waits.items() if self.played else ():
            start = stop - (self.at(seconds) - self.at(0.0))
            yield Event(rank, TimelineRow.WAIT, axes, start, stop)
            stop = start


class PredictionReplay:
    """Timelines and memory histories of a predicted step."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self._rehearsal = prediction.rehearsal
        self._cost_models: dict[tuple[int, int], CostModel] = {}
        self._alone: dict[tuple[int, int], _Played | None] = {}

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of each rank along pp over the whole step, without waits for messages."""
        ranks = range(len(self._rehearsal.tapes))
        events = [event for index in ranks for event in self._outline(index)]
        acts = [(index, act) for index in ranks for act in self._acts[index] if act.stop > act.start]
        every = sum(len(act.played.inside) for _, act in acts if act.played) <= _MOST_EVENTS
        for index, act in acts:
            events += act.inside(rank=index) if every else act.waits(rank=index)
        return Timeline(tuple(events), (tuple(ranks),))

    def history(self, index: int, *, columns: int = 360) -> MemoryHistory:
        """Return the memory of the rank with this index along pp, in so many parts of the step."""
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
        """Yield the memory changes of a rank, in order."""
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
        """Yield the activities of a rank, and the events of the pipeline's clock."""
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
            if computed < row.seconds:  # everybody waits for the last reductions
                yield Event(index, TimelineRow.WAIT, axes, self._free + computed, self._free + row.seconds)
        if self._host:
            yield Event(index, TimelineRow.WAIT, "host", self.prediction.seconds - self._host, self.prediction.seconds)

    def _scheduled(self, index: int, row: Timeline) -> Iterator[_Act]:
        """Yield the segments that the pipeline's clock has placed, and those before and after the schedule."""
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
        """Seconds before the first action."""
        seconds, row = self.prediction.seconds - self._host, self.prediction.timeline
        if row is None:
            return self.prediction.cluster.device.step
        return seconds - row.seconds - max(part.stop for index in range(row.ranks) for part in self._after(index))

    @property
    def _host(self) -> float:
        """Seconds in which every rank waits for state that is kept off the device, drawn at the end."""
        return self.prediction.exposed.get("host", 0.0)

    def _after(self, index: int) -> Iterator[_Played]:
        """Yield what is played after the actions."""
        parts = self._rehearsal.step(index)
        after = (part for part in parts if part.kind is None and part.activity is not StepPhase.BEGIN)
        return _play(after, cost_model=self._cost_model_of(index))

    def _played(self, segment: TapeSegment, index: int) -> _Played | None:
        """Return the times of one segment; None if it has no entries."""
        cost_model = self._cost_model_of(index)
        key = id(segment.entries), id(cost_model)
        if key not in self._alone:
            self._alone[key] = next(_play([segment], cost_model=cost_model), None)
        return self._alone[key]

    def _cost_model_of(self, index: int) -> CostModel:
        """Return the prices of a rank: they depend on the rank rehearsed for it and on its place in a node."""
        tape, cluster = self._rehearsal.tapes[index].index, self.prediction.cluster
        each = self._rehearsal.plan.mesh().size // len(self._rehearsal.tapes)
        key = tape, index * each % cluster.ranks_per_node
        return self._cost_models.setdefault(key, CostModel(cluster, shift=(index - tape) * each))


def _acts(parts: Iterable[_Played], *, start: float) -> Iterator[_Act]:
    """Yield played segments as consecutive activities."""
    return (_Act(part.activity, start + part.start, start + part.stop, part) for part in parts)

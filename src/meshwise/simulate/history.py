"""A step from its begin to its end: what each rank is at, and how much memory it holds, moment by moment.

The pipeline's clock tells when the actions of a schedule begin and end. Here come what lies within them, what is before
and after the schedule, and the memory of the tape at its time:

    │ begin │ 0F0 │ 0F1 │      │   0B0   │   0B1   │ exchange │ update │
              ▔▔     ▔▔           ▔  ▔      ▔  ▔                ▔▔▔▔▔     what it waits for within
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwise.pipeline.action import COMPUTE, RECEIVES, Action
from meshwise.pipeline.clock import event_of
from meshwise.simulate.clock import Prediction, kind_of
from meshwise.simulate.moments import Moment, moments
from meshwise.simulate.price import Prices
from meshwise.simulate.tape import Call, Category, Memory, Segment, Wait
from meshwise.timeline import Event, Stream, Timeline

_MOST_EVENTS = 20_000
"""Collectives and waits within actions that a timeline shows. Where there would be more, what an action waits for along
the same axes is one wait, at its end."""


@dataclass(frozen=True)
class Level:
    """The memory of a rank at one moment."""

    seconds: float
    during: str
    """What the rank is at: an action, or a word, as its timeline has it."""

    device: Mapping[Category, int]
    """Bytes where it computes."""

    @property
    def bytes(self) -> int:
        """In all."""
        return sum(self.device.values())


@dataclass(frozen=True)
class History:
    """The memory of one rank along pp over a step."""

    index: int
    seconds: float
    """Of the step."""

    levels: tuple[Level, ...]
    """For each of as many parts of the step, all as long, the moment when there is most; seconds tell its begin."""

    @property
    def peak(self) -> Level:
        """When there is most."""
        return max(self.levels, key=lambda level: level.bytes)

    def holds(self, category: Category) -> bool:
        """Whether there is ever anything of a category."""
        return any(level.device.get(category) for level in self.levels)


@dataclass(frozen=True)
class _Act:
    """A segment, and when it is played."""

    label: str
    start: float
    stop: float
    moments: tuple[Moment, ...] = ()
    zero: float = 0.0
    """The time of `moments` that is its start."""

    scale: float = 1.0
    """How much longer it is than by them: the clock gives every action the mean of its kind."""

    def at(self, moment: float) -> float:
        """When one of its moments is."""
        return self.start + (moment - self.zero) * self.scale

    def within(self, *, rank: int) -> Iterator[Event]:
        """Its collectives, and what it waits for by axes."""
        axes: dict[int, str] = {}
        for _, entry, start, stop in self.moments:
            if isinstance(entry, Call):
                axes[entry.stamp.sequence] = "·".join(entry.stamp.axes)
                kind = f"{entry.stamp.kind} {axes[entry.stamp.sequence]}"
                yield Event(rank, Stream.COLLECTIVE, kind, self.at(start), self.at(stop))
            elif isinstance(entry, Wait) and stop > start:
                yield Event(rank, Stream.WAIT, axes[entry.sequence], self.at(start), self.at(stop))

    def summed(self, *, rank: int) -> Iterator[Event]:
        """What it waits for in all, at its end."""
        waits: dict[str, float] = defaultdict(float)
        for event in self.within(rank=rank):
            if event.stream is Stream.WAIT:
                waits[event.kind] += event.seconds
        stop = self.stop
        for kind, seconds in waits.items():
            yield Event(rank, Stream.WAIT, kind, stop - seconds, stop)
            stop -= seconds


class Replay:
    """A prediction, taken through its step."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction
        self._rehearsal = prediction.rehearsal
        self._prices: dict[tuple[int, int], Prices] = {}
        self._alone: dict[tuple[int, int], tuple[Moment, ...]] = {}

    @cached_property
    def timeline(self) -> Timeline:
        """What each rank along pp is at, from the step's begin to its end, without its messages' own waits."""
        ranks = range(len(self._rehearsal.tapes))
        events = [event for index in ranks for event in self._outline(index)]
        acts = [(index, act) for index in ranks for act in self._acts[index] if act.stop > act.start]
        within = [event for index, act in acts for event in act.within(rank=index)]
        if len(within) > _MOST_EVENTS:
            within = [event for index, act in acts for event in act.summed(rank=index)]
        return Timeline((*events, *within), (tuple(ranks),))

    def history(self, index: int, *, columns: int = 360) -> History:
        """The memory of the rank with this index along pp, in so many parts of the step."""
        seconds, apart = self.prediction.seconds, self._rehearsal.device != "cpu"
        held = Counter(self.prediction.memory[index].rest)
        levels = [Level(0.0, "begin", dict(held))]
        most = total = sum(held.values())
        for act, time, entry in self._changes(index):
            if entry.host and apart:
                continue
            while (start := len(levels) * seconds / columns) <= time and len(levels) < columns:
                levels.append(Level(start, act.label if start >= act.start else f"before {act.label}", dict(held)))
                most = total
            held[entry.category] += entry.bytes
            total += entry.bytes
            if total > most:
                levels[-1] = Level(levels[-1].seconds, act.label, dict(held))
                most = total
        end = self._acts[index][-1].label
        rest = (Level(step * seconds / columns, end, dict(held)) for step in range(len(levels), columns))
        return History(index, seconds, (*levels, *rest))

    def _changes(self, index: int) -> Iterator[tuple[_Act, float, Memory]]:
        """Of memory, in order."""
        for act in self._acts[index]:
            for _, entry, time, _ in act.moments:
                if isinstance(entry, Memory):
                    yield act, act.at(time), entry

    @cached_property
    def _acts(self) -> list[list[_Act]]:
        """Of each rank along pp, in order."""
        row = self.prediction.timeline
        if row is None:
            every = self._one_after_the_other(0, self._rehearsal.step(0), start=self._free)
            return [[_Act("begin", 0.0, self._free), *every]]
        return [list(self._scheduled(index, row)) for index in range(row.ranks)]

    def _outline(self, index: int) -> Iterator[Event]:
        """The acts of a rank, and what the pipeline's clock has beside them."""
        row = self.prediction.timeline
        for act in (act for act in self._acts[index] if act.stop > act.start):
            if kind_of(act.label) is None:
                yield Event(index, Stream.COLLECTIVE, act.label, act.start, act.stop)
            elif row is None:
                yield event_of(Action.parse(act.label), rank=index, start=act.start, stop=act.stop)
        if row is not None:
            for event in (event for event in row.events if event.rank == index):
                yield replace(event, start=event.start + self._free, stop=event.stop + self._free)
            computed = max(event.stop for events in row.computing for event in events)
            axes = "·".join(self._rehearsal.plan.data_axes)
            if computed < row.seconds:  # everybody waits for the last reductions
                yield Event(index, Stream.WAIT, axes, self._free + computed, self._free + row.seconds)

    def _one_after_the_other(self, index: int, segments: Sequence[Segment], *, start: float) -> Iterator[_Act]:
        """Segments of a rank that nothing else comes between."""
        zero = 0.0
        for _, each in itertools.groupby(moments(segments, prices=self._prices_of(index)), key=_segment):
            own = tuple(each)
            end = _end(own, zero)
            yield _Act(own[0].segment.label, start + zero, start + end, own, zero)
            zero = end

    def _scheduled(self, index: int, row: Timeline) -> Iterator[_Act]:
        """Segments that the pipeline's clock has placed, and those before and after."""
        clocked = {str(event): event for event in row.events if event.rank == index}
        parts = self._rehearsal.step(index)
        before = (moment for part in parts if part.label == "begin" for moment in self._played(part, index))
        yield _Act("begin", 0.0, self._free, tuple(before))
        now = self._free
        for part in (part for part in parts if kind_of(part.label) is not None):
            kind, event, start = kind_of(part.label), clocked[part.label], now
            if kind in COMPUTE:
                start = self._free + event.start
            if kind in COMPUTE | RECEIVES:
                now = self._free + event.stop
            own = self._played(part, index)
            length = _end(own, 0.0)
            yield _Act(part.label, start, now, own, scale=(now - start) / length if length else 1.0)
        yield from self._one_after_the_other(index, self._after(index), start=self._free + row.seconds)

    @cached_property
    def _free(self) -> float:
        """Seconds before the first action."""
        seconds, row = self.prediction.seconds, self.prediction.timeline
        if row is None:
            return seconds - _end(moments(self._rehearsal.step(0), prices=self._prices_of(0)), 0.0)
        ranks = range(row.ranks)
        after = max(_end(moments(self._after(index), prices=self._prices_of(index)), 0.0) for index in ranks)
        return seconds - row.seconds - after

    def _after(self, index: int) -> list[Segment]:
        """What follows the actions."""
        return [part for part in self._rehearsal.step(index) if kind_of(part.label) is None and part.label != "begin"]

    def _played(self, segment: Segment, index: int) -> tuple[Moment, ...]:
        """One segment, from 0 on."""
        prices = self._prices_of(index)
        key = id(segment.entries), id(prices)
        if key not in self._alone:
            self._alone[key] = tuple(moments([segment], prices=prices))
        return self._alone[key]

    def _prices_of(self, index: int) -> Prices:
        """Those of a rank: they depend on which rank was rehearsed for it, and where in a node it is."""
        tape, cluster = self._rehearsal.tapes[index].index, self.prediction.cluster
        each = self._rehearsal.plan.mesh().size // len(self._rehearsal.tapes)
        key = tape, index * each % cluster.ranks_per_node
        return self._prices.setdefault(key, Prices(cluster, shift=(index - tape) * each))


def _segment(moment: Moment) -> int:
    return id(moment.segment)


def _end(of: Iterable[Moment], start: float) -> float:
    """When a rank is through with its moments: collectives may last longer."""
    return max((moment.stop for moment in of if not isinstance(moment.entry, Call)), default=start)

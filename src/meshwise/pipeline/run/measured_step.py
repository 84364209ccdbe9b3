"""Measure a training step: the actions of each rank with their times, and the causes of time without computation.

The time in which a rank does not compute is split by cause. docs/pipeline.md has a table of the causes ("Where the time
went"). A wait inside a computation counts as ideal or imbalance where the schedule lets the rank be idle."""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from meshwise.base.step_timeline import Event, Timeline, TimelineRow, time_within
from meshwise.base.text_format import align_columns
from meshwise.comm.api.flight_recorder import ActivityStopwatch, StepPhase, TimedSpan
from meshwise.comm.api.world import World
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock, event_of
from meshwise.pipeline.schedules.schedule_table import Action, ActionKind, Schedule

_SAME_CLOCK = 1e-3
"""Seconds by which the system times of hosts may differ; smaller offsets count as 0."""


def clock_offset(world: World, *, now: Callable[[], float] = time.monotonic) -> float:
    """Return by how many seconds this rank's clock `now` is ahead of the first rank's; 0 below a millisecond.

    The system times of the hosts (NTP) are taken as equal. Every rank calls it."""
    own = max(now() - time.time() for _ in range(8))  # a pause between the two readings makes the difference smaller
    ahead: float = own - world.exchange(own)[0]
    return ahead if abs(ahead) > _SAME_CLOCK else 0.0


_Means: TypeAlias = Mapping[ActionKind, float]
"""Mean seconds of each kind of computation that occurs in a stage."""


@dataclass(frozen=True)
class LostTime:
    """Seconds of one rank without computation, by cause; docs/pipeline.md defines the causes."""

    ideal: float
    imbalance: float
    receives: float
    collectives: float
    other: float

    @property
    def seconds(self) -> float:
        """Seconds without computation: the sum of all causes."""
        return self.ideal + self.imbalance + self.receives + self.collectives + self.other


@dataclass(frozen=True)
class MeasuredStep:
    """Timeline of one training step on all ranks. Prints as a table of the lost time."""

    schedule: Schedule
    """Schedule that was run, with transfers and reductions (from `lower`)."""
    step: Timeline
    """Timeline of the whole step: the schedule, what comes before its first action, and what after its last."""

    @cached_property
    def run(self) -> Timeline:
        """Timeline of the schedule alone, from the first action to the last of any rank."""
        events: list[Event] = []
        for rank in range(self.step.ranks):
            own = [event for event in self.step.events if event.rank == rank]
            start = next(event.stop for event in own if event.kind == "begin")
            stop = next(event.start for event in own if event.kind == "exchange")
            events += (event for event in own if start <= event.start and event.stop <= stop)
        return Timeline(_from_zero(events), self.step.pipelines)

    @cached_property
    def predicted(self) -> Timeline:
        """Timeline of the schedule if every computation took its stage's mean time and nothing else took time."""
        return self._clocked(self._means)

    @cached_property
    def ideal(self) -> Timeline:
        """Timeline of the schedule if all stages took the mean time and nothing else took time."""
        every = [means for stages in self._means for means in stages]
        kinds = {kind for means in every for kind in means}
        equal = {kind: statistics.fmean(means[kind] for means in every if kind in means) for kind in kinds}
        return self._clocked([[equal] * len(stages) for stages in self._means])

    @cached_property
    def lost(self) -> tuple[LostTime, ...]:
        """Time without computation of each rank, between the first and the last action of any rank."""
        return tuple(map(self._lost, range(self.run.ranks)))

    def _lost(self, rank: int) -> LostTime:
        run = self.run
        own = [event for event in run.events if event.rank == rank and event.row is not TimelineRow.LINK]
        computing, waits = run.computing[rank], run.waiting[rank]
        receives = sum(event.seconds for event in waits if event.stage is not None)
        around = run.seconds - (max(event.stop for event in own) - min(event.start for event in own))
        outside = sum(event.seconds for event in own if event.row is TimelineRow.COLLECTIVE)
        collectives = time_within(computing, inner=waits) + outside
        ideal, predicted = (line.seconds - line.busy[rank] for line in (self.ideal, self.predicted))
        other = run.seconds - run.busy[rank] - receives - around - collectives
        idle = receives + around
        hidden = min(collectives, max(0.0, predicted - idle))
        return LostTime(ideal, predicted - ideal, idle + hidden - predicted, collectives - hidden, other)

    @cached_property
    def _means(self) -> list[list[_Means]]:
        """Mean duration of each kind of computation, per stage of each pipeline."""
        taken: dict[tuple[int, int, ActionKind], list[float]] = {}
        for rank, (row, waits) in enumerate(zip(self.run.computing, self.run.waiting, strict=True)):
            for event in row:
                assert event.stage is not None
                seconds = event.seconds - time_within((event,), inner=waits)
                taken.setdefault((rank, event.stage, ActionKind(event.kind)), []).append(seconds)
        return [
            [
                {kind: statistics.fmean(times) for (rank, of, kind), times in taken.items() if (rank, of) == place}
                for place in ((ranks[row], stage) for stage, row in enumerate(self.schedule.rank_of))
            ]
            for ranks in self.run.pipelines
        ]

    def _clocked(self, means: Sequence[Sequence[_Means]]) -> Timeline:
        """Return the timeline of all pipelines if computations took these means, for the micro-batches that ran."""
        present = {event.microbatch for row in self.run.computing for event in row}
        rows = [tuple(one for one in row if one.microbatch in present) for row in self.schedule.rows]
        events: list[Event] = []
        for ranks, own in zip(self.run.pipelines, means, strict=True):
            costs = [ActionCost(*(stage.get(kind, 0.0) for kind in map(ActionKind, "FIWB"))) for stage in own]
            timeline = clock(Schedule(tuple(rows)), costs=costs)
            events += (dataclasses.replace(event, rank=ranks[event.rank]) for event in timeline.events)
        return Timeline(tuple(events), self.run.pipelines)

    def __str__(self) -> str:
        run = self.run
        rows = [("rank", "stages", "computes", "lost", *(field.name for field in dataclasses.fields(LostTime)))]
        for rank, lost in enumerate(self.lost):
            parts = (f"{100 * part / run.seconds:.1f} %" for part in (lost.seconds, *dataclasses.astuple(lost)))
            rows.append((str(rank), " ".join(map(str, run.stages[rank])), f"{run.busy[rank]:.4g} s", *parts))
        lines = [align_columns(rows, left=0)]
        mean, ideal = (100 * statistics.fmean(line.bubbles) for line in (run, self.ideal))
        lines += [
            f"step {self.step.seconds:.4g} s, the schedule's part of it {run.seconds:.4g} s",
            f"by the clock with each stage's mean {self.predicted.seconds:.4g} s, all equal {self.ideal.seconds:.4g} s",
            f"bubble {mean:.1f} % on average, ideal {ideal:.1f} %",
        ]
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Write the measurement to a JSON file: keys `schedule`, `pipelines` and `events`. Raises OSError."""
        events = [dataclasses.astuple(event) for event in self.step.events]
        fields = {"schedule": str(self.schedule), "pipelines": self.step.pipelines, "events": events}
        path.write_text(json.dumps(fields), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "MeasuredStep":
        """Return the measurement in a file of `write`. Raises OSError, and ValueError for another kind of file."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            events = [Event(rank, TimelineRow(stream), *rest) for rank, stream, *rest in fields["events"]]
            pipelines = tuple(map(tuple, fields["pipelines"]))
            return cls(Schedule.parse(fields["schedule"]), Timeline(tuple(events), pipelines))
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a timeline of a run: {error}") from None


def measured_steps(watch: ActivityStopwatch, *, world: World, schedule: Schedule) -> list[MeasuredStep]:
    """Return the steps that all ranks of `world` recorded in their stopwatches. Every rank calls it."""
    every = world.exchange(watch.read(offset=clock_offset(world)))
    pipelines = world.mesh.groups(["pp"])
    steps = zip(*(_steps(rank, spans) for rank, spans in enumerate(every)), strict=True)
    timelines = (Timeline(_from_zero([event for own in ranks for event in own]), pipelines) for ranks in steps)
    return [MeasuredStep(schedule, timeline) for timeline in timelines]


def _steps(rank: int, spans: Sequence[TimedSpan]) -> Iterator[list[Event]]:
    """Yield the events of each complete step of a rank, from its BEGIN to its UPDATE."""
    others = [span for span in spans if span.waits or span.in_background]
    step: list[Event] = []
    for span in (span for span in spans if not (span.waits or span.in_background)):
        if span.what is StepPhase.BEGIN or step:
            step.append(
                event_of(span.what, rank=rank, start=span.start, stop=span.stop)
                if isinstance(span.what, Action)
                else Event(rank, TimelineRow.COLLECTIVE, str(span.what), span.start, span.stop)
            )
        if span.what is StepPhase.UPDATE and step:
            own = (other for other in others if step[0].start <= other.start and other.stop <= span.stop)
            streams = [(TimelineRow.WAIT if other.waits else TimelineRow.TIERS, other) for other in own]
            yield step + [Event(rank, stream, str(other.what), other.start, other.stop) for stream, other in streams]
            step = []


def _from_zero(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events shifted so that the first begins at 0."""
    start = min(event.start for event in events)
    return tuple(dataclasses.replace(one, start=one.start - start, stop=one.stop - start) for one in events)

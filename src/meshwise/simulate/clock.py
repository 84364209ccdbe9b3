"""When everything in a step happens: the tapes of all ranks, played together on a cluster.

Each rank computes on one stream, a GPU no sooner than its host has started an operation; the collectives along each set
of axes run on streams of their own, one after the other, and a rank stops only where its tape says that it waits for
one. What a stage takes for a micro-batch is played so, and the pipeline's own clock puts the stages together, with
their messages, gathers and reductions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwise.pipeline.action import COMPUTE, Action, Kind
from meshwise.pipeline.clock import Cost, clock
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.memory import RankMemory, fullest, memory_of
from meshwise.simulate.price import Prices, traffic
from meshwise.simulate.rehearsal import Rehearsal
from meshwise.simulate.tape import Call, Operation, Segment, Wait
from meshwise.timeline import Timeline


@dataclass(frozen=True)
class Played:
    """A part of a tape, played."""

    seconds: float
    """From its begin to its end."""

    computing: float
    """Seconds of that in operations."""

    exposed: Mapping[str, float]
    """Seconds of that in which the rank waited, by the axes it waited for."""


@dataclass(frozen=True)
class Prediction:
    """What a plan would take on a cluster."""

    rehearsal: Rehearsal
    cluster: Cluster
    seconds: float
    """Of a step."""

    bubble: float
    """The part of the step in which a rank has nothing to compute because of the pipeline, on average."""

    exposed: Mapping[str, float]
    """Seconds of the step in which the busiest rank only waits for collectives, by their axes."""

    traffic: Mapping[str, float]
    """Bytes that a rank sends in a step over the links `inside` a node and `between` nodes."""

    timeline: Timeline | None
    """Of a pipeline."""

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Of each rank along pp."""
        return memory_of(self.rehearsal)

    @property
    def fits(self) -> bool:
        """Whether every rank's peak, and what libraries take, is within the device's memory."""
        device = self.cluster.device
        return fullest(self.memory).peak.bytes + device.own <= device.memory

    @property
    def tokens_per_second(self) -> float:
        """Of the whole world: elements of the batch's first tensor."""
        return self.rehearsal.tokens / self.seconds

    @property
    def model_flops(self) -> float:
        """Of a step, over all ranks: three times the forward's matrix products; what is recomputed does not count."""
        return 3.0 * sum(forward_flops(self.rehearsal)) * self._replicas

    @property
    def flops(self) -> float:
        """Of a step, over all ranks: every matrix product that is computed."""
        each = (sum(part.flops for part in self.rehearsal.step(index)) for index in range(len(self.rehearsal.tapes)))
        return float(sum(each)) * self._replicas

    @property
    def utilisation(self) -> float:
        """Model flops over what the devices could compute in the same time."""
        ranks = self.rehearsal.plan.mesh().size
        return self.model_flops / (self.seconds * ranks * self._peak)

    @property
    def _replicas(self) -> int:
        return self.rehearsal.plan.mesh().size // len(self.rehearsal.tapes)

    @property
    def _peak(self) -> float:
        counted: Counter[str] = Counter()
        for segment in self.rehearsal.step(0):
            for entry in segment.entries:
                if isinstance(entry, Operation):
                    counted[entry.dtype] += entry.flops
        peak = self.cluster.device.peak
        return peak.get(counted.most_common(1)[0][0]) or max(peak.values())


def predict(rehearsal: Rehearsal, *, cluster: Cluster) -> Prediction:
    """Play a rehearsal on a cluster."""
    prices = Prices(cluster)
    ranks = [_Rank(rehearsal, index, prices) for index in range(len(rehearsal.tapes))]
    sent = max((rank.sent() for rank in ranks), key=lambda sent: sum(sent.values()))
    if rehearsal.plan.pp == 1:
        played = ranks[0].play(rehearsal.step(0))
        seconds = played.seconds + cluster.device.step
        return Prediction(rehearsal, cluster, seconds, 0.0, played.exposed, sent, None)
    costs: dict[int, Cost] = {}
    for rank in ranks:
        costs |= rank.costs()
    timeline = clock(rehearsal.schedule, costs=[costs[stage] for stage in range(rehearsal.schedule.stages)])
    ends = [rank.around() for rank in ranks]
    along = max(event.stop for event in timeline.events)
    last = max(range(len(ranks)), key=lambda index: ends[index].seconds)
    seconds = along + ends[last].seconds + cluster.device.step
    busy = [rank.busy() for rank in ranks]
    bubble = sum(max(0.0, along - one) for one in busy) / len(busy) / seconds
    exposed = ranks[last].play(rehearsal.step(last)).exposed
    return Prediction(rehearsal, cluster, seconds, bubble, exposed, sent, timeline)


def forward_flops(rehearsal: Rehearsal) -> list[int]:
    """Of the matrix products of all micro-batches' forwards, for each rank along pp."""
    return [
        sum(part.flops for part in rehearsal.step(index) if _kind(part) is Kind.F)
        for index in range(len(rehearsal.tapes))
    ]


@dataclass
class _Rank:
    """One rank along pp, and its prices."""

    rehearsal: Rehearsal
    index: int
    prices: Prices
    _durations: dict[str, Played] = field(default_factory=dict)

    def play(self, segments: Iterable[Segment], *, messages: bool = False) -> Played:
        """Play segments one after the other. `messages` between stages are left to the pipeline's clock."""
        device = self.prices.cluster.device
        beside = device.kind != "cpu"
        now = computing = host = 0.0
        free: dict[tuple[str, ...], float] = defaultdict(float)
        ends: dict[int, tuple[float, str]] = {}
        exposed: dict[str, float] = defaultdict(float)
        for segment in segments:
            for entry in segment.entries:
                if isinstance(entry, Operation):
                    took = self.prices.seconds(entry)
                    host = host + device.launch if beside else now + device.launch
                    now, computing = max(now, host) + took, computing + took
                elif isinstance(entry, Call):
                    axes = entry.stamp.axes
                    if entry.stamp.point_to_point and not messages:
                        continue
                    free[axes] = max(now, free[axes]) + self.prices.collective(entry)
                    ends[entry.stamp.sequence] = (free[axes], "·".join(axes))
                    if not self.prices.cluster.overlap:
                        exposed["·".join(axes)] += free[axes] - now
                        now = free[axes]
                elif isinstance(entry, Wait) and entry.sequence in ends:
                    end, name = ends[entry.sequence]
                    exposed[name] += max(0.0, end - now)
                    now = max(now, end)
        return Played(now, computing, exposed)

    def costs(self) -> dict[int, Cost]:
        """What each of its stages costs."""
        found: dict[int, dict[Kind, list[float]]] = defaultdict(lambda: defaultdict(list))
        link: dict[int, float] = {}
        for segment, kind, stage in self._actions():
            if kind in (Kind.SEND_F, Kind.SEND_B):
                link[stage if kind is Kind.SEND_F else stage - 1] = self._sending(segment)
            elif kind in COMPUTE | {Kind.REDUCE, Kind.GATHER}:
                collective = kind in (Kind.REDUCE, Kind.GATHER)
                found[stage][kind].append(self._sending(segment) if collective else self._took(segment))
        return {
            stage: Cost(
                forward=_mean(times[Kind.F]),
                input=_mean(times[Kind.I]) if times[Kind.I] else _mean(times[Kind.B]) / 2,
                weight=_mean(times[Kind.W]) if times[Kind.W] else _mean(times[Kind.B]) / 2,
                link=link.get(stage, 0.0),
                gather=_mean(times[Kind.GATHER]),
                reduce=_mean(times[Kind.REDUCE]),
            )
            for stage, times in found.items()
        }

    def around(self) -> Played:
        """What comes before and after the schedule."""
        return self.play(part for part in self.rehearsal.step(self.index) if _kind(part) is None)

    def busy(self) -> float:
        """Seconds in which it computes its micro-batches."""
        return sum(self._took(segment) for segment, kind, _ in self._actions() if kind in COMPUTE)

    def sent(self) -> dict[str, float]:
        """Bytes that it sends, by the links that they go over."""
        found = {"inside": 0.0, "between": 0.0}
        for segment in self.rehearsal.step(self.index):
            for call in segment.calls():
                if call.stamp.kind != "recv":
                    link = "between" if self.prices.crosses(call.ranks) else "inside"
                    found[link] += call.stamp.bytes * traffic(call.stamp.kind, count=len(call.ranks))
        return found

    def _actions(self) -> Iterable[tuple[Segment, Kind, int]]:
        for segment in self.rehearsal.step(self.index):
            kind = _kind(segment)
            if kind is not None:
                yield segment, kind, Action.parse(segment.label).stage

    def _sending(self, segment: Segment) -> float:
        return sum(map(self.prices.collective, segment.calls()))

    def _took(self, segment: Segment) -> float:
        key = f"{id(segment.entries)}"
        if key not in self._durations:
            self._durations[key] = self.play([segment])
        return self._durations[key].seconds


def _kind(segment: Segment) -> Kind | None:
    """Of the action that a segment is, if it is one."""
    return Action.parse(segment.label).kind if segment.label[:1].isdigit() else None


def _mean(times: list[float]) -> float:
    return sum(times) / len(times) if times else 0.0

"""Predict the time, bubble, waits, traffic and flops of a step from the tapes of all ranks and a cluster.

First each segment of a tape is played alone. A rank computes on one stream; on a GPU, an operation starts after the
host has launched it. Collectives along the same axes run one after the other on their own stream. The rank stops only
where its tape waits for a collective. With pp, the pipeline's clock (`schedule_clock.py`) then combines the stages with
their messages, gathers and reductions."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from meshwise.base.timeline import Timeline, TimelineRow
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.pipeline.schedules.schedule_table import COMPUTE, ActionKind
from meshwise.simulate.cluster import Cluster
from meshwise.simulate.cost_model import CostModel, entry_times, sent_fraction, step_seconds
from meshwise.simulate.predicted_memory import RankMemory, Table, fullest, memory_of, size_text
from meshwise.simulate.rehearsal import Rehearsal
from meshwise.simulate.step_tape import TapeCall, TapeOperation, TapeSegment, TapeWait


@dataclass(frozen=True)
class PlayedSegment:
    """Times of consecutive segments of a tape."""

    seconds: float
    """Seconds from the first start to the last stop."""
    exposed: Mapping[str, float]
    """Seconds in which the rank waits for collectives, by the collectives' axes joined with `·` (`dp·cp`)."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time, waits, traffic and memory of one step of a plan on a cluster."""

    rehearsal: Rehearsal
    cluster: Cluster
    seconds: float
    """Seconds of a step."""
    bubble: float
    """Fraction of the step in which a rank has nothing to compute because of the pipeline; mean over ranks."""
    exposed: Mapping[str, float]
    """Seconds of the step in which a rank only waits, mean over ranks. The keys are the axes of collectives (`dp·cp`),
    and `host` for offloaded state."""
    traffic: Mapping[str, float]
    """Bytes that one rank sends in a step, the largest number of all ranks: `inside` a node and `between` nodes."""
    timeline: Timeline | None
    """Timeline of the pipeline's actions; None for pp=1."""

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
        return self.rehearsal.tokens / self.seconds

    @property
    def model_flops(self) -> float:
        """Flops of the model in a step over all ranks, without recomputation: at most 3 times the forwards' flops."""
        once = sum(each_flops(self.rehearsal, kinds=tuple(ActionKind), repeated=False))
        return min(3.0 * sum(each_flops(self.rehearsal, kinds=(ActionKind.F,))), float(once)) * self._replicas

    @property
    def flops(self) -> float:
        """Flops of all matrix products of a step over all ranks, with recomputation."""
        return float(sum(each_flops(self.rehearsal))) * self._replicas

    @property
    def utilisation(self) -> float:
        """Model flops utilisation (MFU): model flops per second, divided by the peak of all ranks."""
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
                if isinstance(entry, TapeOperation):
                    counted[entry.dtype] += entry.flops
        return self.cluster.device.peak_of(counted.most_common(1)[0][0])


def predict(rehearsal: Rehearsal, *, cluster: Cluster) -> Prediction:
    """Return the prediction for a rehearsed plan on a cluster."""
    cost_model, step = CostModel(cluster), cluster.device.step
    places = _places(rehearsal, cluster)
    # one rank for each place: the first along pp
    ranks = {place: _Rank(rehearsal, places.index(place), cost_model) for place in dict.fromkeys(places)}
    each = [rank.sent() for rank in ranks.values()]
    sent = {link: max(one[link] for one in each) for link in each[0]}
    if rehearsal.plan.pp == 1:
        played = ranks[places[0]].play(rehearsal.step(0))
        took, waits = _add_host_time(rehearsal, cluster, played.seconds + step, played.exposed)
        return Prediction(rehearsal, cluster, took, 0.0, waits, sent, None)
    costs: dict[int, ActionCost] = {}
    for index, place in enumerate(places):
        costs |= dict(zip(rehearsal.schedule.stages_of(index), ranks[place].costs().values(), strict=True))
    timeline = clock(rehearsal.schedule, costs=[costs[stage] for stage in range(rehearsal.schedule.stages)])
    computed = max(event.stop for event in timeline.events if event.stream is TimelineRow.COMPUTE)
    along = max(event.stop for event in timeline.events)
    around = max(rank.around().seconds for rank in ranks.values())
    spent = along + around + step
    exposed: dict[str, float] = defaultdict(float)
    idle = 0.0
    for place, count in Counter(places).items():
        part = count / len(places)
        idle += part * (computed - ranks[place].busy() + around - ranks[place].around().seconds)
        for axes, seconds in ranks[place].waits().items():
            exposed[axes] += part * seconds
    exposed["·".join(rehearsal.plan.row_axes)] += along - computed  # reductions after the last computation
    took, waits = _add_host_time(rehearsal, cluster, spent, exposed)
    return Prediction(rehearsal, cluster, took, max(0.0, idle) / took, waits, sent, timeline)


def time_table(prediction: Prediction) -> Table:
    """Return rows of (title, value): seconds of a step, tokens per second, utilisation, bubble, waits, traffic, fit."""
    waits = sorted(prediction.exposed.items(), key=lambda item: -item[1])
    return [
        ("", ""),
        ("step", f"{prediction.seconds:.4g} s"),
        ("tokens/s", f"{prediction.tokens_per_second:,.0f}"),
        ("utilisation", f"{100 * prediction.utilisation:.1f} % of the peak, without recomputation"),
        ("bubble", f"{100 * prediction.bubble:.1f} % of the step"),
        *(
            (f"waits for {axes}", f"{100 * took / prediction.seconds:.1f} % of the step")
            for axes, took in waits
            if took
        ),
        *((f"sent {where}", size_text(size)) for where, size in prediction.traffic.items() if size),
        ("fits", "yes" if prediction.fits else "no: see --memory"),
    ]


def _add_host_time(
    rehearsal: Rehearsal, cluster: Cluster, took: float, exposed: Mapping[str, float]
) -> tuple[float, Mapping[str, float]]:
    """Return a step's seconds and waits, with the time for offloaded state added; its wait has the key `host`."""
    on_host = rehearsal.device == "cuda" and rehearsal.plan.tiers.updates_on_cpu
    whole = max(step_seconds(tape, took=took, cluster=cluster, on_host=on_host) for tape in rehearsal.tapes)
    return (whole, {**exposed, "host": whole - took}) if whole > took else (took, exposed)


def each_flops(
    rehearsal: Rehearsal, *, kinds: Collection[ActionKind | None] = (None, *ActionKind), repeated: bool = True
) -> list[int]:
    """Return the flops of a step in these kinds of action, for each rank along pp; None: phases outside of actions.

    `repeated`: also count the forwards that a backward repeats. Equal segments are counted once and multiplied."""
    found: dict[int, int] = {}
    for index in {tape.index for tape in rehearsal.tapes}:
        parts = [part for part in rehearsal.step(index) if part.kind in kinds]
        times = Counter(id(part.entries) for part in parts)
        once = {id(part.entries): part for part in parts}
        found[index] = sum(times[key] * _flops(part, repeated=repeated) for key, part in once.items())
    return [found[tape.index] for tape in rehearsal.tapes]


def _flops(part: TapeSegment, *, repeated: bool) -> int:
    """Return the flops of a segment. In a forward, no operation counts as repeated."""
    if repeated or part.kind is ActionKind.F:
        return part.flops
    return sum(one.flops for one in part.entries if isinstance(one, TapeOperation) and not one.again)


_Place = tuple[int, int]
"""(index along pp of the rank whose tape it shares, its own number in its node). Equal pairs have equal times."""


def _places(rehearsal: Rehearsal, cluster: Cluster) -> list[_Place]:
    """Return the place of each rank along pp."""
    each = rehearsal.plan.mesh().size // len(rehearsal.tapes)
    return [(tape.index, index * each % cluster.ranks_per_node) for index, tape in enumerate(rehearsal.tapes)]


class _Rank:
    """One rank along pp, with the times of its segments; equal segments are played once."""

    def __init__(self, rehearsal: Rehearsal, index: int, cost_model: CostModel) -> None:
        each = rehearsal.plan.mesh().size // len(rehearsal.tapes)
        self.cost_model = dataclasses.replace(cost_model, shift=(index - rehearsal.tapes[index].index) * each)
        parts = rehearsal.step(index)
        counted = Counter(id(part.entries) for part in parts)
        once = {id(part.entries): part for part in parts}
        self._around = [part for part in parts if part.kind is None]
        self._actions = [(part.action, part, counted[key]) for key, part in once.items() if part.action is not None]
        self._played = {id(part.entries): self.play([part]) for _, part, _ in self._actions}

    def play(self, segments: Iterable[TapeSegment]) -> PlayedSegment:
        """Return the times of consecutive segments without messages between stages, which the clock adds."""
        now = 0.0
        axes: dict[int, str] = {}
        exposed: dict[str, float] = defaultdict(float)
        for _, entry, start, stop in entry_times(segments, cost_model=self.cost_model):
            if isinstance(entry, TapeCall):
                axes[entry.record.sequence] = "·".join(entry.record.axes)
                continue
            now = stop
            if isinstance(entry, TapeWait) and stop > start:
                exposed[axes[entry.sequence]] += stop - start
        return PlayedSegment(now, exposed)

    def costs(self) -> dict[int, ActionCost]:
        """Return the mean seconds of each kind of action, by stage of this rank, ascending."""
        found: dict[int, dict[ActionKind, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
        for action, part, times in self._actions:
            took = self._seconds(part) if action.kind in COMPUTE else sum(map(self.cost_model.collective, part.calls()))
            found[action.stage][action.kind].append((took, times))
        return {
            stage: ActionCost(
                forward=_mean(times[ActionKind.F]),
                input=_mean(times[ActionKind.I]),
                weight=_mean(times[ActionKind.W]),
                backward=_mean(times[ActionKind.B]) if times[ActionKind.B] else None,
                link=_mean(times[ActionKind.SEND_F]) or _mean(times[ActionKind.RECV_B]),
                gather=_mean(times[ActionKind.GATHER]),
                reduce=_mean(times[ActionKind.REDUCE]),
            )
            for stage, times in sorted(found.items())
        }

    def around(self) -> PlayedSegment:
        """Return the times of the phases before and after the schedule's actions."""
        return self.play(self._around)

    def busy(self) -> float:
        """Return the seconds of all forwards and backwards, including their waits for collectives."""
        return sum(self._seconds(part) * times for action, part, times in self._actions if action.kind in COMPUTE)

    def waits(self) -> Mapping[str, float]:
        """Return the seconds of waits in forwards, backwards and the phases around the schedule, by axes."""
        found = Counter(self.around().exposed)
        for action, part, times in self._actions:
            if action.kind in COMPUTE:
                found.update({axes: took * times for axes, took in self._played[id(part.entries)].exposed.items()})
        return found

    def sent(self) -> dict[str, float]:
        """Return the bytes that this rank sends in a step `inside` a node and `between` nodes.

        A ring over several nodes leaves each node at one rank only; the node's other ranks send inside the node."""
        found = {"inside": 0.0, "between": 0.0}
        for part, times in (
            *((part, 1) for part in self._around),
            *((part, times) for _, part, times in self._actions),
        ):
            for call in part.calls():
                if call.record.kind != "recv":
                    size = times * call.record.bytes * sent_fraction(call.record.kind, count=len(call.ranks))
                    here = self.cost_model.mean_ranks_per_node(call.ranks)
                    leaving = 1 / here if self.cost_model.crosses_nodes(call.ranks) else 0.0
                    found["between"] += size * leaving
                    found["inside"] += size * (1 - leaving)
        return found

    def _seconds(self, part: TapeSegment) -> float:
        return self._played[id(part.entries)].seconds


def _mean(times: list[tuple[float, int]]) -> float:
    count = sum(many for _, many in times)
    return sum(took * many for took, many in times) / count if count else 0.0

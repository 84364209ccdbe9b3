"""How much memory each rank of a plan needs, by category, over the actions of a step.

The peak is that of the first two steps: the first allocates the optimizer's state, the second has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwise.simulate.rehearsal import Rehearsal
from meshwise.simulate.tape import Category, Memory, Segment


@dataclass(frozen=True)
class Moment:
    """The most that a rank has while it does one action."""

    label: str
    device: Mapping[Category, int]
    """Bytes where it computes."""

    host: Mapping[Category, int]
    """Bytes in the host's memory, where the rank computes elsewhere."""

    @property
    def bytes(self) -> int:
        """On the device, in all."""
        return sum(self.device.values())


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank along pp, and of all that are like it."""

    index: int
    built: Mapping[Category, int]
    """What there is before the first step."""

    first: tuple[Moment, ...]
    steady: tuple[Moment, ...]
    """Action by action, of a run's first step and of those that follow."""

    away: Mapping[str, int]
    """Bytes that rest elsewhere than on the device, by tier: `cpu`, `disk`."""

    @property
    def peak(self) -> Moment:
        """When it needs most on the device."""
        return max((*self.first, *self.steady), key=lambda moment: moment.bytes)

    @property
    def rest(self) -> Mapping[Category, int]:
        """What there is between steps: before the first action of one that follows."""
        return self.steady[0].device


def memory_of(rehearsal: Rehearsal) -> tuple[RankMemory, ...]:
    """The memory of every rank along pp."""
    known: dict[int, _Change] = {}
    return tuple(_rank(rehearsal, index, known) for index in range(len(rehearsal.tapes)))


def fullest(ranks: Iterable[RankMemory]) -> RankMemory:
    """The rank that needs most."""
    return max(ranks, key=lambda rank: rank.peak.bytes)


def _rank(rehearsal: Rehearsal, index: int, known: dict[int, _Change]) -> RankMemory:
    tape = rehearsal.tapes[index]
    level = _Level(apart=rehearsal.device != "cpu", known=known)
    level.play(tape.build)
    built = dict(level.device)
    first = tuple(map(level.play, rehearsal.step(index, first=True)))
    # What was run is exact; what stands in for other micro-batches may leave a remainder that the step's end releases.
    exact = _Level(apart=level.apart, known=known)
    for segment in (tape.build, *tape.first):
        exact.play(segment)
    start = Moment("", dict(exact.device), dict(exact.host))
    steady = (start, *map(exact.play, rehearsal.step(index)))
    return RankMemory(index, built, first, steady, tape.away)


@dataclass(frozen=True)
class _Change:
    """What a segment does to the memory there is: in all, and up to the moment when it has most on the device."""

    device: Counter[Category]
    host: Counter[Category]
    most: Counter[Category]
    most_host: Counter[Category]

    @classmethod
    def of(cls, segment: Segment, *, apart: bool) -> _Change:
        """`apart`: the host's memory is not that of the device."""
        device, host = Counter[Category](), Counter[Category]()
        total = highest = 0
        most, most_host = Counter[Category](), Counter[Category]()
        for entry in segment.entries:
            if not isinstance(entry, Memory):
                continue
            if entry.host and apart:
                host[entry.category] += entry.bytes
                most_host |= host
                continue
            device[entry.category] += entry.bytes
            total += entry.bytes
            if total > highest:
                highest, most = total, Counter(device)
        return cls(device, host, most, most_host)


class _Level:
    """How much there is of each category now."""

    def __init__(self, *, apart: bool, known: dict[int, _Change]) -> None:
        """`known`: of segments with the same entries, by their identity."""
        self.apart = apart
        self.device: Counter[Category] = Counter()
        self.host: Counter[Category] = Counter()
        self._known = known

    def play(self, segment: Segment) -> Moment:
        """Go through a segment; the moment when there is most on the device."""
        change = self._known.get(id(segment.entries))
        if change is None:
            change = self._known[id(segment.entries)] = _Change.of(segment, apart=self.apart)
        moment = Moment(segment.label, _sum(self.device, change.most), _sum(self.host, change.most_host))
        self.device.update(change.device)
        self.host.update(change.host)
        return moment


def _sum(one: Mapping[Category, int], other: Mapping[Category, int]) -> dict[Category, int]:
    return {category: one.get(category, 0) + other.get(category, 0) for category in {**one, **other}}

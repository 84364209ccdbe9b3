"""Compute the memory of each rank of a plan, by category, over the actions of a step.

The peak is the maximum of the first two steps: the first allocates the optimizer's state, the second begins with it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from meshwise.simulate.rehearsal import Rehearsal
from meshwise.simulate.step_tape import Category, MemoryChange, TapeSegment


@dataclass(frozen=True)
class ActionMemory:
    """Peak memory of a rank during one action."""

    label: str

    bytes: int
    """On the device, in all."""
    before: tuple[Mapping[Category, int], Mapping[Category, int]]
    """Bytes of each category when the action begins, where the rank computes and in the host's memory."""
    more: tuple[Mapping[Category, int], Mapping[Category, int]] = ({}, {})
    """Bytes of each category that are added up to the peak."""

    @cached_property
    def device(self) -> Mapping[Category, int]:
        """Bytes of each category on the device."""
        return _sum(self.before[0], self.more[0])

    @cached_property
    def host(self) -> Mapping[Category, int]:
        """Bytes of each category in the host's memory, if the device has memory of its own."""
        return _sum(self.before[1], self.more[1])


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank along pp, and of all ranks that do the same work."""

    index: int
    built: Mapping[Category, int]
    """Bytes by category before the first step."""
    first: tuple[ActionMemory, ...]
    steady: tuple[ActionMemory, ...]
    """Action by action, of a run's first step and of those that follow."""
    away: Mapping[str, int]
    """Bytes that are kept off the device, by tier: `cpu`, `disk`."""

    @property
    def peak(self) -> ActionMemory:
        """Action at which the rank needs most memory on the device."""
        return max((*self.first, *self.steady), key=lambda moment: moment.bytes)

    @property
    def rest(self) -> Mapping[Category, int]:
        """Bytes by category between steps, before the first action of a later step."""
        return self.steady[0].device


def memory_of(rehearsal: Rehearsal) -> tuple[RankMemory, ...]:
    """Return the memory of every rank along pp."""
    known: dict[int, _Change] = {}
    return tuple(_rank(rehearsal, index, known) for index in range(len(rehearsal.tapes)))


def fullest(ranks: Iterable[RankMemory]) -> RankMemory:
    """Return the rank that needs most."""
    return max(ranks, key=lambda rank: rank.peak.bytes)


def _rank(rehearsal: Rehearsal, index: int, known: "dict[int, _Change]") -> RankMemory:
    tape = rehearsal.tapes[index]
    level = _Level(apart=rehearsal.device != "cpu", known=known)
    level.play(tape.build)
    built = level.device
    first = tuple(map(level.play, rehearsal.step(index, first=True)))
    # What was run is exact; what stands in for other micro-batches may leave a remainder that the step's end releases.
    exact = _Level(apart=level.apart, known=known)
    for segment in (tape.build, *tape.first):
        exact.play(segment)
    start = ActionMemory("", sum(exact.device.values()), (exact.device, exact.host))
    steady = (start, *map(exact.play, rehearsal.step(index)))
    return RankMemory(index, built, first, steady, tape.away)


@dataclass(frozen=True)
class _Change:
    """Memory changes of a segment: in total, and up to its peak on the device."""

    device: Counter[Category]
    host: Counter[Category]
    most: Counter[Category]
    most_host: Counter[Category]

    total: int
    highest: int
    """Bytes on the device."""

    @classmethod
    def of(cls, segment: TapeSegment, *, apart: bool) -> "_Change":
        """Return the changes of a segment; `apart`: host memory is separate from device memory."""
        device, host = Counter[Category](), Counter[Category]()
        total = highest = 0
        most, most_host = Counter[Category](), Counter[Category]()
        for entry in segment.entries:
            if not isinstance(entry, MemoryChange):
                continue
            if entry.host and apart:
                host[entry.category] += entry.bytes
                most_host |= host
                continue
            device[entry.category] += entry.bytes
            total += entry.bytes
            if total > highest:
                highest, most = total, Counter(device)
        return cls(device, host, most, most_host, total, highest)


class _Level:
    """Current bytes of each category."""

    def __init__(self, *, apart: bool, known: dict[int, _Change]) -> None:
        """`known`: of segments with the same entries, by their identity."""
        self.apart = apart
        self.device: Mapping[Category, int] = {}
        self.host: Mapping[Category, int] = {}
        self._total = 0
        self._known = known

    def play(self, segment: TapeSegment) -> ActionMemory:
        """Apply a segment and return the moment with the most memory on the device."""
        change = self._known.get(id(segment.entries))
        if change is None:
            change = self._known[id(segment.entries)] = _Change.of(segment, apart=self.apart)
        before, more = (self.device, self.host), (change.most, change.most_host)
        moment = ActionMemory(str(segment.activity), self._total + change.highest, before, more)
        self._total += change.total
        self.device = _sum(self.device, change.device) if change.device else self.device
        self.host = _sum(self.host, change.host) if change.host else self.host
        return moment


def _sum(one: Mapping[Category, int], other: Mapping[Category, int]) -> dict[Category, int]:
    found = dict(one)
    for category, size in other.items():
        found[category] = found.get(category, 0) + size
    return found

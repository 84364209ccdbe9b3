"""Compute the memory of each rank of a rehearsed plan, by category, for every action of a step.

The peak is the maximum over two steps: the first allocates the optimizer's state, the second starts with that state."""

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
    """Activity, such as `2F0` or `update`; "" for the time before the step."""
    bytes: int
    """Bytes on the device at the peak, over all categories."""
    before: tuple[Mapping[Category, int], Mapping[Category, int]]
    """Bytes by category when the action begins: on the device, and in the host's memory."""
    more: tuple[Mapping[Category, int], Mapping[Category, int]] = ({}, {})
    """Bytes by category that the action adds: until its peak on the device, and at most in the host's memory."""

    @cached_property
    def device(self) -> Mapping[Category, int]:
        """Bytes by category on the device at the peak."""
        return _sum(self.before[0], self.more[0])

    @cached_property
    def host(self) -> Mapping[Category, int]:
        """Largest bytes of each category in the host's memory; empty if the device is a CPU."""
        return _sum(self.before[1], self.more[1])


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank along pp in the first and in a later step; all its replicas use the same."""

    index: int
    built: Mapping[Category, int]
    """Bytes by category before the first step."""
    first: tuple[ActionMemory, ...]
    """Peak of each action of a run's first step."""
    steady: tuple[ActionMemory, ...]
    """Memory before a later step, then the peak of each action of this step."""
    away: Mapping[str, int]
    """Bytes of state off the device, by tier: `cpu`, `disk`."""

    @property
    def peak(self) -> ActionMemory:
        """Action in which the rank needs the most memory on its device."""
        return max((*self.first, *self.steady), key=lambda moment: moment.bytes)

    @property
    def rest(self) -> Mapping[Category, int]:
        """Bytes by category on the device between steps."""
        return self.steady[0].device


def memory_of(rehearsal: Rehearsal) -> tuple[RankMemory, ...]:
    """Return the memory of every rank along pp, in order."""
    known: dict[int, _Change] = {}
    return tuple(_rank(rehearsal, index, known) for index in range(len(rehearsal.tapes)))


def fullest(ranks: Iterable[RankMemory]) -> RankMemory:
    """Return the rank with the largest peak on its device."""
    return max(ranks, key=lambda rank: rank.peak.bytes)


def _rank(rehearsal: Rehearsal, index: int, known: "dict[int, _Change]") -> RankMemory:
    tape = rehearsal.tapes[index]
    level = _Level(apart=rehearsal.device != "cpu", known=known)
    level.play(tape.build)
    built = level.device
    first = tuple(map(level.play, rehearsal.step(index, first=True)))
    # Recorded segments are exact, but repeats of them for other micro-batches may keep memory until a step ends.
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
    """Changes by the end of the segment, on the device and on the host."""
    most: Counter[Category]
    most_host: Counter[Category]
    """Changes up to the device's peak, and the largest change of each category on the host."""
    total: int
    highest: int
    """Bytes on the device over all categories: at the end, and at the peak."""

    @classmethod
    def of(cls, segment: TapeSegment, *, apart: bool) -> "_Change":
        """Return the memory changes of a segment; `apart`: the host's memory is separate from the device's."""
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
    """Current bytes of each category while segments are applied in order."""

    def __init__(self, *, apart: bool, known: dict[int, _Change]) -> None:
        """`known`: changes of segments by the `id` of their entries; this object adds to it."""
        self.apart = apart
        self.device: Mapping[Category, int] = {}
        self.host: Mapping[Category, int] = {}
        self._total = 0
        self._known = known

    def play(self, segment: TapeSegment) -> ActionMemory:
        """Apply the memory changes of a segment and return its peak."""
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

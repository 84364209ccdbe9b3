"""Derive what a rank does for many like blocks from three rehearsals that differ by one block.

    | three blocks   a b  x y  x y  c d  u u
    | four           a b  x y  x y  x y  c d  u u u
    | five           a b  x y  x y  x y  x y  c d  u u u u

What a block adds is what the blocks before it have done there, once more. Where the fourth and the fifth add the same
at the same places, those that follow do. Two numbers change on the way: the number of a call, because more calls come
before it, and the bytes of operations over the tensors of all blocks at once. Each has to move by as much from four to
five as from three to four.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from meshwise.simulate.tape import Entry, Tape, TapeCall, TapeSegment, TapeWait

Place: TypeAlias = tuple[int, int]
"""An entry of the shortest of three sequences, and which copy of it: 0 is the entry itself."""


FEWEST, MOST = 3, 6
"""Like blocks of the lowest stack that is run, and of the highest that is run to find out about a higher one."""

Run = TypeVar("Run")
Longer = TypeVar("Longer")


class UnevenError(ValueError):
    """Three sequences do not grow by the same."""


@dataclass(frozen=True)
class BlockGrowth:
    """Growth of a sequence with every block."""

    size: int
    """Of the shortest."""
    added: tuple[tuple[int, int], ...]
    """(position, length): before this position of the shortest come the `length` entries before it, once more."""

    @classmethod
    def of(cls, three: Sequence[Sequence[Hashable]]) -> "BlockGrowth":
        """Return the growth of three sequences, each with one block more than the one before. Raises UnevenError."""
        one, two, last = three
        added = _Search(one, two).added(0, 0, free=0)
        if added is None:
            raise UnevenError
        growth = cls(len(one), added)
        if [one[index] for index, _ in growth.places(2)] != list(last):
            raise UnevenError
        return growth

    def places(self, more: int) -> Iterator[Place]:
        """Yield where each entry comes from in a sequence with `more` blocks more."""
        done = 0
        for position, length in self.added:
            yield from ((index, 0) for index in range(done, position))
            yield from ((index, copy) for copy in range(1, more + 1) for index in range(position - length, position))
            done = position
        yield from ((index, 0) for index in range(done, self.size))


class _Search:
    """Looks for what one sequence has more than another."""

    def __init__(self, one: Sequence[Hashable], two: Sequence[Hashable]) -> None:
        self._one, self._two = list(one), list(two)
        self._failed: set[tuple[int, int]] = set()

    def added(self, at: int, other: int, *, free: int) -> tuple[tuple[int, int], ...] | None:
        """From these positions on; nothing before `free` may be added once more."""
        one, two = self._one, self._two
        while at < len(one) and other < len(two) and one[at] == two[other]:
            at, other = at + 1, other + 1
        more = (len(two) - other) - (len(one) - at)
        if not more:
            return () if at == len(one) else None
        if (at, other) in self._failed:
            return None
        for length in range(1, min(more, at - free) + 1):
            if two[other] == two[other - length] and two[other : other + length] == two[other - length : other]:
                rest = self.added(at, other + length, free=at)
                if rest is not None:
                    return ((at, length), *rest)
        self._failed.add((at, other))
        return None


def lengthened(
    run: Callable[[int], Run], *, count: int, longer: Callable[[Sequence[Run], int], Longer]
) -> Longer | None:
    """Return the run of a model with `count` like blocks from runs with fewer, or None where these grow unevenly.

    `run(blocks)`; `longer(three, more)` raises UnevenError, and then the three that follow are asked.
    """
    found = [run(FEWEST), run(FEWEST + 1)]
    for blocks in range(FEWEST + 2, MOST + 1):
        found = [*found[-2:], run(blocks)]
        with contextlib.suppress(UnevenError):
            return longer(found, count - blocks + 2)
    return None


def grown(tapes: Sequence[Tape], *, more: int) -> Tape:
    """Return the tape of a model with so many blocks more than the first of these, which are one block apart.

    Raises UnevenError.
    """
    parts = [(tape.build, *tape.first, *tape.steady) for tape in tapes]
    if len({(*(part.activity for part in each), *_apart(tape)) for each, tape in zip(parts, tapes, strict=True)}) > 1:
        raise UnevenError
    calls = [_calls(each) for each in parts]
    found = []
    for each in zip(*parts, strict=True):
        entries = [part.entries for part in each]
        keys = [[_key(entry, made) for entry in one] for one, made in zip(entries, calls, strict=True)]
        found.append(TapeSegment(each[0].activity, _grown(entries, keys, more)))
    steady = 1 + len(tapes[0].first)
    return dataclasses.replace(tapes[0], build=found[0], first=tuple(found[1:steady]), steady=tuple(found[steady:]))


def _apart(tape: Tape) -> tuple[Hashable, ...]:
    """Return a key of a tape without its segments."""
    return tape.index, *sorted(tape.away.items()), tape.beside, tape.at_update


def _calls(parts: Sequence[TapeSegment]) -> dict[int, TapeCall]:
    """Return the calls of a tape by their numbers, which they are without."""
    return {
        call.stamp.sequence: TapeCall(call.stamp._replace(sequence=0), call.ranks)
        for part in parts
        for call in part.calls()
    }


def _grown(three: Sequence[Sequence[Entry]], keys: Sequence[Sequence[Hashable]], more: int) -> tuple[Entry, ...]:
    """Return the entries of a segment with so many blocks more; `keys` mark entries that do the same."""
    common = set(keys[0]).intersection(*keys[1:])
    plain = [
        [key if key in common else _with(entry, 0) for key, entry in zip(each, entries, strict=True)]
        for each, entries in zip(keys, three, strict=True)
    ]
    growth = BlockGrowth.of(plain)
    told = [
        {place: _number(entry) for place, entry in zip(growth.places(blocks), entries, strict=True)}
        for blocks, entries in enumerate(three)
    ]
    by_block = [told[1][index, 0] - told[0][index, 0] for index in range(growth.size)]
    by_copy = [told[1].get((index, 1), told[1][index, 0]) - told[1][index, 0] for index in range(growth.size)]

    def number(place: Place, blocks: int) -> int:
        index, copy = place
        return told[0][index, 0] + blocks * by_block[index] + copy * by_copy[index]

    if any(number(place, 2) != found for place, found in told[2].items()):
        raise UnevenError
    moving = [bool(one or other) for one, other in zip(by_block, by_copy, strict=True)]
    return tuple(
        _with(three[0][place[0]], number(place, more)) if moving[place[0]] else three[0][place[0]]
        for place in growth.places(more)
    )


def _key(entry: Entry, calls: Mapping[int, TapeCall]) -> Hashable:
    if isinstance(entry, TapeWait):
        return TapeWait(0), calls.get(entry.sequence)
    return calls[entry.stamp.sequence] if isinstance(entry, TapeCall) else entry


def _number(entry: Entry) -> int:
    """Return the number of an entry that may shift."""
    if isinstance(entry, TapeCall):
        return entry.stamp.sequence
    return entry.sequence if isinstance(entry, TapeWait) else entry.bytes


def _with(entry: Entry, number: int) -> Entry:
    """Return the same with another number."""
    if isinstance(entry, TapeCall):
        return TapeCall(entry.stamp._replace(sequence=number), entry.ranks)
    if isinstance(entry, TapeWait):
        return TapeWait(number)
    return dataclasses.replace(entry, bytes=number)

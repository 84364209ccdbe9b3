"""Lanes: the calls of one group of ranks, in the order in which all of them make these.

A rank that makes a call posts it: where its tensors lie, or if they are small what they hold. Nothing else happens by
itself; no thread competes with the one that computes. What is left to do, reading from the others and adding up, a rank
does when it waits for the call, or comes by because it makes another call and finds that the others are there:

    rank 0   post #7 ········ compute ········ post #8: does its part of #7 │ compute ··· wait #8
    rank 1       post #7 ········ compute ········ post #8: its part of #7 │ compute ··· wait #8

The parts of a lane are done in the order of its calls; lanes do not wait for each other.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import memmove
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from meshwise.comm import board
from meshwise.comm.board import PAYLOAD_BYTES, RING
from meshwise.comm.group import Group
from meshwise.comm.journal import RanksDisagree, Stamp
from meshwise.comm.lost import lost
from meshwise.comm.meanwhile import Meanwhile, Outlook
from meshwise.comm.room import Room
from meshwise.comm.span import Far, Near, Span

_IN_PAYLOAD, _IN_PRIVATE = 0, -1
_HEAD, _PART = 1, 3  # words: the tag; place, offset and bytes
_ALIGNMENT = 16


def nbytes(x: Tensor) -> int:
    """Bytes of its elements."""
    return x.numel() * x.element_size()


def travels_in_payload(tensors: Sequence[Tensor]) -> bool:
    """Whether they are so small that a call brings their contents, and they are the caller's again at once."""
    return sum(_aligned(nbytes(x)) for x in tensors) <= PAYLOAD_BYTES


@dataclass
class Call:
    """One rank's part in a collective.

    gives   its tensors: the others read them, and in some collectives write them
    needs   the indices of the ranks that must have posted before `act` can be called
    users   the indices of the ranks that use this rank's tensors in their `act`
    after   what is done when all of them have
    """

    stamp: Stamp
    gives: Sequence[Tensor] = ()
    needs: Sequence[int] = ()
    users: Sequence[int] = ()
    act: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    number: int = -1
    acted: bool = False
    finished: bool = False

    def __post_init__(self) -> None:
        self.tag = zlib.crc32(self.stamp.agreed.encode())
        """What the ranks have to agree about."""


class Lane:
    """One rank's side of a lane."""

    def __init__(self, room: Room, *, key: int, ranks: tuple[int, ...], meanwhile: Meanwhile) -> None:
        self.ranks = ranks
        self.index = ranks.index(room.rank)
        self.others = [(self.index + step) % len(ranks) for step in range(1, len(ranks))]
        """The indices after this one and around, so that not everyone begins with the same rank."""
        self._room = room
        self._meanwhile = meanwhile
        self._key = key
        self._size = _HEAD + _PART * len(ranks)
        self._start = room.board.add_lane(key, record=self._size)
        self._posted = 0
        self._done = 0
        self._calls: deque[Call] = deque()
        self._is_awaited = False
        self._boards = [room.board if rank == room.rank else room.peer(rank).board for rank in ranks]
        self._starts: dict[int, int] = {}

    # ---- what this rank does -----------------------------------------------------------------------------------

    def post(self, call: Call) -> None:
        """Make the call known to the others."""
        call.number = self._posted
        if (overwritten := call.number - RING) >= 0:
            self._catch_up(overwritten)
            self._await_done(call, range(len(self.ranks)), overwritten)
        own, start = self._room.board, self._start
        at = board.record(start, number=call.number, size=self._size)
        words = [call.tag, *(word for where in self._places(call) for word in where)]
        for offset, word in enumerate(words):
            own.words[at + offset] = word
        self._posted += 1
        self._calls.append(call)
        own.publish(board.posted(start), value=self._posted)
        own.ring()

    def _places(self, call: Call) -> list[tuple[int, int, int]]:
        """Where the tensors of a call are: in the payload, in shared memory, or at an address of this process."""
        if travels_in_payload(call.gives):
            begin, places = board.payload(self._start, number=call.number, size=self._size), []
            offset = 0
            for x in call.gives:
                size = nbytes(x)
                memmove(self._room.board.address + begin + offset, x.data_ptr(), size)
                places.append((_IN_PAYLOAD, offset, size))
                offset += _aligned(size)
            return places
        located = [(self._room.slabs.locate(x), x) for x in call.gives]
        return [
            (*where, nbytes(x)) if where is not None else (_IN_PRIVATE, x.data_ptr(), nbytes(x)) for where, x in located
        ]

    def advance(self) -> bool:
        """Do this rank's part of every call whose turn it is; whether there was one."""
        acted = False
        for call in self._due():
            if not all(self._is_there(index, call) for index in call.needs):
                break
            self._act(call)
            acted = True
        return acted

    def finish(self, call: Call) -> None:
        """Block until the results of the call are in place and nobody uses its tensors any more."""
        self._catch_up(call.number)
        self._await_done(call, call.users, call.number)
        self._end(call)

    def tidy(self) -> None:
        """Let go of the tensors of calls that everyone has done."""
        while self._calls and self._calls[0].acted:
            call = self._calls[0]
            if not self.is_over(call):
                return
            self._end(call)
            self._calls.popleft()

    def is_over(self, call: Call) -> bool:
        """Whether its results are in place and nobody uses its tensors any more."""
        return call.acted and all(self._count_done(index) > call.number for index in call.users)

    @property
    def busy(self) -> bool:
        """Whether this rank has a part left to do."""
        return self._done < self._posted

    @property
    def calls(self) -> list[Call]:
        """Those that have not been seen to end."""
        return list(self._calls)

    def _due(self) -> list[Call]:
        return [call for call in self._calls if not call.acted]

    def _catch_up(self, number: int) -> None:
        """Do this rank's part of every call up to that number."""
        for call in self._due():
            if call.number > number:
                return
            for index in call.needs:
                self._await(call, index, partial(self._is_over_or_there, index, call))
            if not call.acted:
                self._act(call)

    def _act(self, call: Call) -> None:
        try:
            if call.act is not None:
                call.act()
        except OSError as error:
            if (gone := self._room.missing(self.ranks)) is not None:
                raise lost(gone, about=call.stamp, error=error) from error
            raise
        call.acted = True
        self._done += 1
        self._room.board.publish(board.done(self._start), value=self._done)
        if self._is_awaited:  # by a rank whose tensor this one used; a payload belongs to nobody
            self._is_awaited = False
            self._room.board.ring()

    @staticmethod
    def _end(call: Call) -> None:
        if not call.finished:
            call.finished = True
            if call.after is not None:
                call.after()
            call.gives, call.act, call.after = (), None, None

    # ---- what the others have done -----------------------------------------------------------------------------

    def span(self, call: Call, *, index: int, like: Tensor, which: int = 0) -> Span:
        """The tensor that a rank gave to this call, of the size and dtype of `like`.

        Raises RanksDisagree when it has another size.
        """
        place, offset, size = self._given(call, index, like, which)
        if place == _IN_PAYLOAD:
            return Near(self._boards[index].bytes[offset : offset + size].view(like.dtype))
        return self._elsewhere(index, place, offset, like)

    def take(self, call: Call, *, index: int, into: Tensor, which: int = 0) -> None:
        """Copy the tensor that a rank gave to this call, of the size and dtype of `into`.

        Raises RanksDisagree when it has another size, OSError when the other process's memory cannot be read.
        """
        place, offset, size = self._given(call, index, into, which)
        if place == _IN_PAYLOAD:
            memmove(into.data_ptr(), self._boards[index].address + offset, size)
        else:
            self._elsewhere(index, place, offset, into).copy_to(into)

    def _given(self, call: Call, index: int, like: Tensor, which: int) -> tuple[int, int, int]:
        """Where the tensor is: the place, the offset there (in a payload: on that rank's board) and the bytes."""
        start = self._known_start(index)
        at = board.record(start, number=call.number, size=self._size) + _HEAD + _PART * which
        place, offset, size = self._boards[index].words[at : at + _PART]
        if size != nbytes(like):
            raise RanksDisagree(
                f"rank {self.ranks[index]} gives {size} bytes where rank {self._room.rank} takes {nbytes(like)} "
                f"in {call.stamp}"
            )
        if place == _IN_PAYLOAD:
            offset += board.payload(start, number=call.number, size=self._size)
        return place, offset, size

    def _elsewhere(self, index: int, place: int, offset: int, like: Tensor) -> Span:
        """A tensor that the call did not bring: its owner waits until it has been used."""
        rank = self.ranks[index]
        self._is_awaited = True
        if place == _IN_PRIVATE:
            assert self._room.memory is not None
            return Far(self._room.memory, rank, offset, like.numel(), like.element_size())
        return Near(self._room.peer(rank).slabs.at(place)[offset : offset + nbytes(like)].view(like.dtype))

    def _is_there(self, index: int, call: Call) -> bool:
        """Whether that rank has made the same call. One that made another is waited for: the hang report tells."""
        start = self._known_start(index)
        theirs = self._boards[index]
        if start < 0 or theirs.read(board.posted(start)) <= call.number:
            return False
        return theirs.words[board.record(start, number=call.number, size=self._size)] == call.tag

    def _is_over_or_there(self, index: int, call: Call) -> bool:
        """The same, or this rank has come by and done its part, after which the record may be another call's."""
        return call.acted or self._is_there(index, call)

    def _count_done(self, index: int) -> int:
        start = self._known_start(index)
        return 0 if start < 0 else self._boards[index].read(board.done(start))

    def _known_start(self, index: int) -> int:
        """Where the lane begins on that rank's board; -1 as long as it has not called anything in it."""
        if index not in self._starts:
            start = self._boards[index].lane(self._key)
            if start is None:
                return -1
            self._starts[index] = start
        return self._starts[index]

    def _await_done(self, call: Call, indices: Sequence[int], number: int) -> None:
        for index in indices:
            if index != self.index:
                self._await(call, index, lambda index=index: self._count_done(index) > number)  # type: ignore[misc]

    def _await(self, call: Call, index: int, condition: Callable[[], bool]) -> None:
        if not condition():
            rank, stamp = self.ranks[index], call.stamp
            self._room.wait_for(rank, condition=condition, among=self.ranks, about=stamp, meanwhile=self._meanwhile)


class Lanes:
    """All lanes of one rank. `errands`: what else it does when it comes by."""

    def __init__(self, room: Room, *, errands: Sequence[Meanwhile] = ()) -> None:
        self.room = room
        self.closed = False
        self._errands = errands
        self._lanes: dict[tuple[tuple[int, ...], str], Lane] = {}

    def of(self, group: Group) -> Lane:
        """The lane of these ranks for their purpose."""
        assert not self.closed, "the world was closed"
        name = group.ranks, group.purpose
        if name not in self._lanes:
            self._lanes[name] = Lane(self.room, key=_key(*name), ranks=group.ranks, meanwhile=self.come_by)
        return self._lanes[name]

    def come_by(self) -> Outlook:
        """Do what has become due in any lane, and the errands."""
        busy = [lane for lane in self._lanes.values() if lane.busy]
        outlooks = [Outlook.DID if lane.advance() else Outlook.LATER for lane in busy]
        return max([*outlooks, *(errand() for errand in self._errands)], default=Outlook.NOTHING)

    def close(self) -> None:
        """Wait for every call under way; there will be no other."""
        for lane in self._lanes.values():
            for call in lane.calls:
                lane.finish(call)
        self.closed = True


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _key(ranks: tuple[int, ...], purpose: str) -> int:
    """The name of a lane as a number."""
    text = f"{purpose} {ranks}".encode()
    return zlib.crc32(text) << 31 | zlib.crc32(text[::-1]) >> 1

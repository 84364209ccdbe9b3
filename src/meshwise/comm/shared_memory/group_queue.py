"""Queue the collectives of one group of ranks in shared memory, and do this rank's part of each.

To post a call, a rank writes on its board the locations of its tensors, or the contents of small tensors. When the
other ranks have posted, it reads their tensors and adds them up: when it waits for the call, makes another call, or
calls `World.progress` (docs/architecture.md, "Worlds"):

    rank 0   post #7 ········ compute ········ post #8: does its part of #7 │ compute ··· wait #8
    rank 1       post #7 ········ compute ········ post #8: its part of #7 │ compute ··· wait #8

Within a queue, a rank does its parts in the order of the calls; different queues do not wait for each other.

A board has records for 32 calls of a queue. The next call is posted when every rank has done its part of the oldest
call. Until then the call stays in this process. The rank does not block: other ranks may wait for its next call.

`QueueState` is the state of one rank in one queue. It lies on the board of the rank, in words of 8 bytes:

    | word    0     number of calls posted
    |         8     number of calls of which the rank has done its part
    |         16…   ring of 32 records: tag of the call, then place, offset and size of each tensor that the rank gives
    |         …     ring of payloads, one for each record: contents of small tensors

The tag is a hash of all calls so far, equal on ranks that made the same calls. Only its rank writes a state."""

import os
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import memmove
from typing import TypeAlias

from torch import Tensor

from meshwise.comm.api.flight_recorder import CallRecord, RanksDisagree
from meshwise.comm.api.launcher_info import rank_lost_error
from meshwise.comm.api.world import Group, Work, World
from meshwise.comm.shared_memory.host_connection import PAYLOAD_BYTES, PAYLOAD_WORDS, Board, HostConnection, Progress

RECORDS_PER_QUEUE = 32
"""Number of calls of a queue for which a board has records. The next call is posted when a record becomes free."""

IN_PAYLOAD = 0
"""Place of a tensor that is in the payload of its call, on the board, and not in a `SharedSegment`."""

TensorLocation: TypeAlias = tuple[int, int, int]
"""Location of a tensor: its place, its offset in bytes there, and its size in bytes.

The place is `IN_PAYLOAD` or `SharedSegment.place`. The offset counts from the start of the board or segment."""

_POSTED, _DONE, _RECORDS = 0, 8, 16
_HEAD, _PART = 1, 3  # words
_ALIGNMENT = 16


def travels_in_payload(tensors: Sequence[Tensor]) -> bool:
    """Return whether the contents of all these tensors together fit into one payload of the board, 64 KB."""
    return sum(_aligned(x.nbytes) for x in tensors) <= PAYLOAD_BYTES


class QueueState:
    """State of one rank in one queue, as words on the board of that rank."""

    def __init__(self, board: Board, *, start: int, ranks: int) -> None:
        """Use the words of `board` from index `start`, for a queue of `ranks` ranks."""
        self.board = board
        self._posted, self._done, self._records = start + _POSTED, start + _DONE, start + _RECORDS
        self._size = _record_words(ranks)
        self._payloads = 8 * (start + _payload_words(ranks))

    @classmethod
    def make(cls, board: Board, *, key: int, ranks: int) -> "QueueState":
        """Add a queue to this rank's own `board`, and return its state. key: name of the queue, equal on all ranks."""
        start = board.add_queue(key, words=_payload_words(ranks) + RECORDS_PER_QUEUE * PAYLOAD_WORDS)
        return cls(board, start=start, ranks=ranks)

    @classmethod
    def find(cls, board: Board, *, key: int, ranks: int) -> "QueueState | None":
        """Return the state of the rank that owns `board`, or None before that rank's first call in the queue."""
        start = board.queue_start(key)
        return None if start is None else cls(board, start=start, ranks=ranks)

    # ---- read ----------------------------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Number of calls for which the rank has done its part."""
        return self.board.read(self._done)

    @property
    def posted(self) -> int:
        """Number of calls that the rank has posted."""
        return self.board.read(self._posted)

    def has_posted(self, number: int, *, tag: int) -> bool:
        """Return whether the rank has posted call `number` with this `tag`, a hash of the call and all calls before."""
        return self.board.read(self._posted) > number and self.board.words[self._record(number)] == tag

    def location(self, number: int, *, which: int) -> TensorLocation:
        """Return the location of tensor `which` of call `number`."""
        at = self._record(number) + _HEAD + _PART * which
        place, offset, size = self.board.words[at : at + _PART]
        return place, offset, size

    # ---- write, by the rank itself ---------------------------------------------------------------------------------

    def write_record(self, number: int, *, tag: int, locations: Sequence[TensorLocation]) -> None:
        """Write the record of call `number`: its tag and the locations of its tensors."""
        words, at = self.board.words, self._record(number)
        words[at] = tag
        for place, offset, size in locations:
            words[at + 1], words[at + 2], words[at + 3] = place, offset, size
            at += _PART

    def write_payload(self, number: int, *, gives: Sequence[Tensor]) -> list[TensorLocation]:
        """Copy small tensors into the payload of call `number`, and return their locations."""
        offset = self._payloads + number % RECORDS_PER_QUEUE * PAYLOAD_BYTES
        locations = []
        for x in gives:
            size = x.nbytes
            memmove(self.board.address + offset, x.data_ptr(), size)
            locations.append((IN_PAYLOAD, offset, size))
            offset += _aligned(size)
        return locations

    def publish_posted(self, count: int) -> None:
        """Publish the number of calls posted, and wake the ranks that sleep on the board."""
        self.board.publish(self._posted, value=count)
        self.board.ring()

    def publish_done(self, count: int) -> None:
        """Publish the number of calls done, without waking other ranks."""
        self.board.publish(self._done, value=count)

    def _record(self, number: int) -> int:
        return self._records + number % RECORDS_PER_QUEUE * self._size


def _aligned(size: int) -> int:
    return (size + _ALIGNMENT - 1) & -_ALIGNMENT


def _record_words(ranks: int) -> int:
    return _HEAD + _PART * ranks


def _payload_words(ranks: int) -> int:
    """Return the index, within the queue, of the first word of the payloads: a multiple of `PAYLOAD_WORDS`."""
    return -(-(_RECORDS + RECORDS_PER_QUEUE * _record_words(ranks)) // PAYLOAD_WORDS) * PAYLOAD_WORDS


class QueuedCall(Work):
    """One collective as this rank calls it: the tensors that other ranks use, and this rank's part of the work.

    | gives       tensors of this rank that other ranks read, and in some collectives write
    | in_payload  True if the board has a copy of the contents of `gives`, so the tensors are free once it is posted
    | needs       group indices of the ranks that must have posted before `act` can run
    | users       group indices of the ranks that use this rank's tensors in their `act`
    | joint       name of the joint tensor that this rank has written to (`JointTensors.name`), instead of `gives`; or 0
    | act         function that does this rank's part of the call; None if there is nothing to do
    | after       function called when all ranks have done their part; None if there is nothing to do
    | number      number of the call in its queue, from 0; -1 before `GroupQueue.post`
    | tag         hash of this call and all calls before it in its queue; 0 before `GroupQueue.post`
    | acted       True when this rank has done its part"""

    gives: Sequence[Tensor] = ()
    in_payload = True
    needs: Sequence[int] = ()
    users: Sequence[int] = ()
    joint = 0
    act: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    number = -1
    tag = 0
    acted = False
    adds = False  # True when `act` has begun to overwrite its inputs; a second `act` would add overwritten values

    def __init__(self, world: World, *, record: CallRecord, queue: "GroupQueue") -> None:
        super().__init__(world, record=record)
        self.record = record
        self.queue = queue
        self.others = queue.others

    @property
    def ready(self) -> bool:
        """True if the results are complete and no rank uses this rank's tensors any more."""
        return self._done or self.queue.is_over(self)

    def tensors(self, own: Tensor, *, which: int = 0) -> list[Tensor]:
        """Return tensor `which` of every rank, in group order; for this rank `own`. All have the size of `own`."""
        queue = self.queue
        return [
            own if index == queue.index else queue.tensor(self, index=index, like=own, which=which)
            for index in range(len(queue.ranks))
        ]

    def end(self) -> None:
        """Call `after`, and release the tensors of the call."""
        if self.after is not None:
            self.after()
        self.gives, self.act, self.after = (), None, None

    def _finish(self) -> None:
        self.queue.finish(self)


class GroupQueue:
    """Queue of the calls of one group on this rank, with the states of the other ranks' queues."""

    def __init__(
        self, host: HostConnection, *, key: int, ranks: tuple[int, ...], meanwhile: Callable[[int | None], Progress]
    ) -> None:
        """Add the queue `key` to this rank's board. meanwhile: does other work during a wait for the given rank."""
        self.ranks = ranks
        self.index = ranks.index(host.rank)
        self.others = [(self.index + step) % len(ranks) for step in range(1, len(ranks))]
        """Group indices of the other ranks, from the next index around, so ranks begin with different peers."""
        self.waits_for: int | None = None
        """Rank that had not posted the call at which the last `advance` stopped; None if `advance` did all calls."""
        self._host = host
        self._meanwhile = meanwhile
        self._key = key
        self._own = QueueState.make(host.board, key=key, ranks=len(ranks))
        self._sides: list[QueueState | None] = [self._own if rank == host.rank else None for rank in ranks]
        """Queue states of all ranks, in group order; None before the first call of a rank is found."""
        self._digest = 0
        """CRC32 of all calls so far and of the names of their joint tensors. After a different call, the tags of two
        ranks differ in all later calls too."""
        self._posted = 0
        self._done = 0
        self._free = RECORDS_PER_QUEUE
        """Calls below this number have a free record, which no other rank can still need to read."""
        self._unposted: deque[QueuedCall] = deque()  # this rank has called them, and no record is free
        self._due: deque[QueuedCall] = deque()  # posted, and this rank has not done its part
        self._lent: deque[QueuedCall] = deque()  # other ranks may still use this rank's tensors
        self._is_awaited = False
        self._is_acting = False

    # ---- what this rank does -----------------------------------------------------------------------------------

    def post(self, call: QueuedCall) -> None:
        """Post the call to the other ranks as soon as the board has a free record."""
        call.number = self._posted + len(self._unposted)
        call.tag = self._digest = zlib.crc32(call.record.signature.encode(), self._digest ^ call.joint)
        self._unposted.append(call)
        self._publish()

    def _publish(self) -> bool:
        """Post the calls for which the board has a free record, and return whether a call was posted."""
        before = self._posted
        while self._unposted and self._has_room(self._posted):
            self._write(self._unposted.popleft())
        return self._posted > before

    def _has_room(self, number: int) -> bool:
        """Return whether the record for call `number` is free: every rank has done the call that used this record."""
        if number >= self._free:
            self._free = RECORDS_PER_QUEUE + min(self._done, *map(self._count_done, self.others))
        return number < self._free

    def _write(self, call: QueuedCall) -> None:
        number = call.number
        if call.in_payload:
            places = self._own.write_payload(number, gives=call.gives)
        else:
            places = [self._place(x) for x in call.gives]
            self._lent.append(call)
        self._own.write_record(number, tag=call.tag, locations=places)
        self._posted = number + 1
        self._due.append(call)
        self._own.publish_posted(number + 1)

    def advance(self) -> bool:
        """Do this rank's part of every call that all needed ranks have posted; return whether a call was posted or
        done. Stops at the first call that a rank has not posted, and stores that rank in `waits_for`."""
        self.waits_for = None
        acted = self._publish()
        while self._due:
            call = self._due[0]
            for index in call.needs:
                if not self._is_there(index, call):
                    self.waits_for = self.ranks[index]
                    return acted
            self._act(call)
            acted = True
        return acted

    def is_ahead(self, index: int) -> bool:
        """Return whether group index `index` has posted a call that this rank has not made."""
        side = self._side(index)
        return side is not None and side.posted > self._posted + len(self._unposted)

    def finish(self, call: QueuedCall) -> None:
        """Block until the results of the call are complete and no rank uses this rank's tensors any more. Raises
        RankLostError when a rank of the group has ended, RanksDisagree when tensors do not fit together."""
        self._catch_up(call.number)
        if not call.in_payload:
            for index in call.users:
                self._await_done(call, index, call.number)
            call.end()

    def release_finished(self) -> None:
        """End the calls whose tensors no other rank uses any more, and release these tensors."""
        while self._lent and self.is_over(self._lent[0]):
            self._lent.popleft().end()

    def is_over(self, call: QueuedCall) -> bool:
        """Return whether the results of `call` are complete and no rank uses this rank's tensors any more."""
        return call.acted and all(self._count_done(index) > call.number for index in call.users)

    def close(self) -> None:
        """Finish all calls that are not complete."""
        for call in (*self._lent, *self._due, *self._unposted):
            self.finish(call)

    @property
    def busy(self) -> bool:
        """True if a call of this rank is not posted yet, or this rank has not done its part of a call."""
        return bool(self._due or self._unposted)

    def _place(self, x: Tensor) -> TensorLocation:
        """Return the location of a tensor of this rank, which is in a shared segment."""
        where = self._host.slabs.locate(x)
        assert where is not None, "no other rank can reach the tensor"
        return (*where, x.nbytes)

    def _catch_up(self, number: int) -> None:
        """Do this rank's part of every call up to and including `number`."""
        while self._done <= number:
            if not self._due:
                call = self._unposted[0]  # its record is not free yet
                for index in self.others:
                    self._await_done(call, index, call.number - RECORDS_PER_QUEUE)
                self._publish()
                continue
            call = self._due[0]
            for index in call.needs:
                if not self._is_there(index, call):
                    # This rank may do the call while it waits; then the record may be reused, and `_is_there` is False.
                    self._await(call, index, lambda: call.acted or self._is_there(index, call))  # noqa: B023
            if not call.acted:
                self._act(call)

    def _act(self, call: QueuedCall) -> None:
        """Do this rank's part of the next call. Raises RuntimeError while another thread does it."""
        if self._is_acting:
            raise RuntimeError(f"two threads of rank {self._host.rank} are at {call.record}; use one at a time")
        self._is_acting = True
        try:
            if call.act is not None:
                call.act()
        except OSError as error:
            if (gone := self._host.ended_rank_behind(self.ranks, error=error)) is not None:
                raise rank_lost_error(gone, about=call.record, error=error) from error
            error.add_note(f"while rank {self._host.rank} did its part of {call.record}")
            raise
        finally:
            self._is_acting = False
        call.acted = True
        self._due.popleft()
        self._done += 1
        self._own.publish_done(self._done)
        if self._is_awaited:  # a rank whose tensor this rank has read may sleep until the reading is done
            self._is_awaited = False
            self._own.board.ring()
        if call.in_payload:
            call.end()
        if self._unposted:
            self._publish()

    # ---- the tensors and calls of the other ranks --------------------------------------------------------------

    def tensor(self, call: QueuedCall, *, index: int, like: Tensor, which: int) -> Tensor:
        """Return tensor `which` of group index `index`, with the size and dtype of `like`, or raise RanksDisagree."""
        side = self._side(index)
        assert side is not None, "the rank has called it"
        place, offset, size = side.location(call.number, which=which)
        if size != like.nbytes:
            raise RanksDisagree(
                f"rank {self.ranks[index]} gives {size} bytes where rank {self._host.rank} takes {like.nbytes} in "
                f"{call.record}"
            )
        if place == IN_PAYLOAD:
            return self._board(index).view(offset, size, like.dtype)
        self._is_awaited = True  # the owner waits until this rank has used the tensor
        return self._host.peers[self.ranks[index]].segments.at(place)[offset : offset + size].view(like.dtype)

    def _is_there(self, index: int, call: QueuedCall) -> bool:
        """Return whether group index `index` has posted the same call. A rank that posted a different call counts as
        absent: this rank waits, and the watchdog reports the difference."""
        side = self._sides[index] or self._side(index)
        return side is not None and side.has_posted(call.number, tag=call.tag)

    def _count_done(self, index: int) -> int:
        side = self._side(index)
        return 0 if side is None else side.done

    def _side(self, index: int) -> QueueState | None:
        """Return the queue state of group index `index`, or None before its first call in the queue."""
        if self._sides[index] is None:
            self._sides[index] = QueueState.find(self._board(index), key=self._key, ranks=len(self.ranks))
        return self._sides[index]

    def _board(self, index: int) -> Board:
        return self._host.peers[self.ranks[index]].board

    def _await_done(self, call: QueuedCall, index: int, number: int) -> None:
        self._await(call, index, lambda: self._count_done(index) > number)

    def _await(self, call: QueuedCall, index: int, condition: Callable[[], bool]) -> None:
        if not condition():
            rank, record, meanwhile = self.ranks[index], call.record, self._meanwhile
            self._host.wait_for(
                rank, condition=condition, among=self.ranks, about=record, meanwhile=lambda: meanwhile(rank)
            )


class GroupQueues:
    """The queues of all groups of one rank."""

    def __init__(self, host: HostConnection) -> None:
        self.host = host
        self.closed = False
        self._process = os.getpid()
        self._queues: dict[tuple[tuple[int, ...], str], GroupQueue] = {}

    def of(self, group: Group) -> GroupQueue:
        """Return the queue of the group's ranks and purpose; make the queue at the first call."""
        assert not self.closed, "the world was closed"
        name = group.ranks, group.purpose
        if name not in self._queues:
            self._queues[name] = GroupQueue(self.host, key=_key(*name), ranks=group.ranks, meanwhile=self.progress)
        return self._queues[name]

    def progress(self, bell: int | None = None) -> Progress:
        """Do this rank's part of the calls of all queues, as far as the other ranks have posted. Return `DID` if
        anything was done, `LATER` if a queue waits for another rank, else `NOTHING`. bell: the rank whose bell wakes
        the caller; a queue that waits for this rank does not count as `LATER`. In a fork of the process, do nothing."""
        outlook = Progress.NOTHING
        if os.getpid() != self._process:
            return outlook
        for queue in self._queues.values():
            if queue.busy:
                if queue.advance():
                    outlook = Progress.DID
                elif queue.waits_for != bell:
                    outlook = max(outlook, Progress.LATER)
        return outlook

    def close(self) -> None:
        """Finish all calls of all queues, and close the connection to the other ranks. A second call does nothing."""
        if not self.closed:
            for queue in self._queues.values():
                queue.close()
            self.closed = True
            self.host.leave()


def _key(ranks: tuple[int, ...], purpose: str) -> int:
    """Return a hash of the ranks and purpose of a queue, which names the queue on the boards."""
    text = f"{purpose} {ranks}".encode()
    return zlib.crc32(text) << 31 | zlib.crc32(text[::-1]) >> 1

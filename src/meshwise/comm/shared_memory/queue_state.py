"""Read and write one rank's state of a queue on its board: the calls it has made, and how many it has done.

    | words   +0    calls posted
    |         +8    calls done
    |         +16…  a ring of records: the call's tag, then place, offset and bytes of each tensor that the rank gives
    |         …     a ring of payloads, one for each record: what small tensors hold

`group_queue` explains queues. One rank writes here, all others read.
"""

from collections.abc import Sequence
from ctypes import memmove
from typing import TypeAlias

from torch import Tensor

from meshwise.comm.shared_memory.board import PAGE_WORDS, PAYLOAD_BYTES, Board

RING = 32
"""Calls of a queue that a board has records for; further calls wait until a record is free."""

IN_PAYLOAD, IN_PRIVATE, IN_JOINT = 0, -1, -2
"""Places other than a shared segment: the payload of the call, private memory of the rank, and a joint tensor, which
all ranks of the queue have mapped.
"""

Place: TypeAlias = tuple[int, int, int]
"""Where a tensor is: the place, the offset there (in a payload, from its begin; or its address) and its bytes."""

_POSTED, _DONE, _RECORDS = 0, 8, 16
_HEAD, _PART = 1, 3  # words
_ALIGNMENT = 16


def travels_in_payload(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are so small that the board carries their contents, up to 64 KB in total."""
    size = 0
    for x in tensors:
        size += _aligned(x.nbytes)
    return size <= PAYLOAD_BYTES


class QueueState:
    """State of one rank in a queue of `ranks` ranks."""

    def __init__(self, board: Board, *, start: int, ranks: int) -> None:
        self.board = board
        self._posted, self._done, self._records = start + _POSTED, start + _DONE, start + _RECORDS
        self._size = _record_words(ranks)
        self._payloads = 8 * (start + _payload_words(ranks))

    @classmethod
    def make(cls, board: Board, *, key: int, ranks: int) -> "QueueState":
        """Return this rank's own state, on its board."""
        start = board.add_queue(key, words=_payload_words(ranks) + RING * PAGE_WORDS)
        return cls(board, start=start, ranks=ranks)

    @classmethod
    def find(cls, board: Board, *, key: int, ranks: int) -> "QueueState | None":
        """Return another rank's state; None before its first call in the queue."""
        start = board.queue_start(key)
        return None if start is None else cls(board, start=start, ranks=ranks)

    # ---- read ----------------------------------------------------------------------------------------------------

    @property
    def posted(self) -> int:
        """Number of calls the rank has made."""
        return self.board.read(self._posted)

    @property
    def done(self) -> int:
        """Number of calls that the rank has completed."""
        return self.board.read(self._done)

    def has_posted(self, number: int, *, tag: int) -> bool:
        """Return whether the rank has made call `number` with this tag."""
        return self.posted > number and self.board.words[self._record(number)] == tag

    def given(self, number: int, *, which: int) -> Place:
        """Return the place, offset and bytes of a tensor of a call; the offset of a payload is on the board."""
        at = self._record(number) + _HEAD + _PART * which
        place, offset, size = self.board.words[at : at + _PART]
        return (place, self._payload(number) + offset, size) if place == IN_PAYLOAD else (place, offset, size)

    # ---- written by the rank itself --------------------------------------------------------------------------------

    def note(self, number: int, *, tag: int, places: Sequence[Place]) -> None:
        """Write the record of a call: its tag and the places of its tensors."""
        words, at = self.board.words, self._record(number)
        words[at] = tag
        for place, offset, size in places:
            words[at + 1], words[at + 2], words[at + 3] = place, offset, size
            at += _PART

    def bring(self, number: int, *, gives: Sequence[Tensor]) -> list[Place]:
        """Copy small tensors into the payload of a call, and return their places."""
        address, offset, places = self.board.address + self._payload(number), 0, []
        for x in gives:
            size = x.nbytes
            memmove(address + offset, x.data_ptr(), size)
            places.append((IN_PAYLOAD, offset, size))
            offset += _aligned(size)
        return places

    def publish_posted(self, count: int) -> None:
        """Publish the number of calls made, and wake the ranks that wait for one."""
        self.board.publish(self._posted, value=count)
        self.board.ring()

    def publish_done(self, count: int) -> None:
        """Publish the number of calls done."""
        self.board.publish(self._done, value=count)

    def _record(self, number: int) -> int:
        return self._records + number % RING * self._size

    def _payload(self, number: int) -> int:
        return self._payloads + number % RING * PAYLOAD_BYTES


def _aligned(size: int) -> int:
    return (size + _ALIGNMENT - 1) & -_ALIGNMENT


def _record_words(ranks: int) -> int:
    return _HEAD + _PART * ranks


def _payload_words(ranks: int) -> int:
    """Return the word at which the payloads begin: on a page of their own."""
    return -(-(_RECORDS + RING * _record_words(ranks)) // PAGE_WORDS) * PAGE_WORDS

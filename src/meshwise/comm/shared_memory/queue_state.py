"""Read and write the state of one rank in a queue of collectives: the calls that it has posted, and how many are done.

The state lies on the board of the rank, in words of 8 bytes:

    | word    +0    number of calls posted
    |         +8    number of calls of which the rank has done its part
    |         +16…  ring of 32 records: tag of the call, then place, offset and size of each tensor that the rank gives
    |         …     ring of payloads, one for each record: contents of small tensors

The tag is a hash of all calls so far, equal on ranks that made the same calls. `group_queue` explains queues. Only the
rank itself writes its state; the other ranks read it."""

from collections.abc import Sequence
from ctypes import memmove
from typing import TypeAlias

from torch import Tensor

from meshwise.comm.shared_memory.board import PAYLOAD_BYTES, PAYLOAD_WORDS, Board

RECORDS_PER_QUEUE = 32
"""Number of calls of a queue for which a board has records. The next call is posted when a record becomes free."""

IN_PAYLOAD, IN_PRIVATE, IN_JOINT = 0, -1, -2
"""Places of a tensor that is not in a `SharedSegment`. IN_PAYLOAD: in the payload of its call, on the board.
IN_PRIVATE: in private memory of the rank. IN_JOINT: in memory that all ranks have mapped (`World.shared_empty`)."""

TensorLocation: TypeAlias = tuple[int, int, int]
"""Location of a tensor: its place, its offset in bytes there, and its size in bytes.

The place is a constant above or `SharedSegment.place`. The offset counts from the start of the payload or segment. For
private memory it is the address. For a joint tensor the second number is `JointTensors.name`, and the third is 0."""

_POSTED, _DONE, _RECORDS = 0, 8, 16
_HEAD, _PART = 1, 3  # words
_ALIGNMENT = 16


def travels_in_payload(tensors: Sequence[Tensor]) -> bool:
    """Return whether the contents of all these tensors together fit into one payload of the board, 64 KB."""
    size = 0
    for x in tensors:
        size += _aligned(x.nbytes)
    return size <= PAYLOAD_BYTES


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
    def posted(self) -> int:
        """Number of calls that the rank has posted."""
        return self.board.read(self._posted)

    @property
    def done(self) -> int:
        """Number of calls for which the rank has done its part."""
        return self.board.read(self._done)

    def has_posted(self, number: int, *, tag: int) -> bool:
        """Return whether the rank has posted call `number`, after the same calls as this rank, which has this tag."""
        return self.posted > number and self.board.words[self._record(number)] == tag

    def location_on_board(self, number: int, *, which: int) -> TensorLocation:
        """Return the location of tensor `which` of call `number`; an IN_PAYLOAD offset is from the board's start."""
        at = self._record(number) + _HEAD + _PART * which
        place, offset, size = self.board.words[at : at + _PART]
        return (place, self._payload(number) + offset, size) if place == IN_PAYLOAD else (place, offset, size)

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
        address, offset, locations = self.board.address + self._payload(number), 0, []
        for x in gives:
            size = x.nbytes
            memmove(address + offset, x.data_ptr(), size)
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

    def _payload(self, number: int) -> int:
        return self._payloads + number % RECORDS_PER_QUEUE * PAYLOAD_BYTES


def _aligned(size: int) -> int:
    return (size + _ALIGNMENT - 1) & -_ALIGNMENT


def _record_words(ranks: int) -> int:
    return _HEAD + _PART * ranks


def _payload_words(ranks: int) -> int:
    """Return the index, within the queue, of the first word of the payloads: a multiple of `PAYLOAD_WORDS`."""
    return -(-(_RECORDS + RECORDS_PER_QUEUE * _record_words(ranks)) // PAYLOAD_WORDS) * PAYLOAD_WORDS

"""Connect this rank with the other ranks of its host: map their boards, wait for them, notice when one has ended.

A `Board` publishes the counters of one rank in shared memory that only this rank writes and all ranks of its host read.
A word is an integer of 8 bytes, read and written in one piece. So a rank counts its finished calls without a lock:

    | word    0     the bell: other ranks sleep on it (as on a futex) until this rank changes its value
    |         8     number of queues
    |         16…   for each queue: its key, and the index of its first word
    |         …     the queues, each at a multiple of `PAYLOAD_WORDS` (`QueueState` describes their contents)

docs/architecture.md says how a rank waits, and has the rules of the shared memory ("Worlds")."""

import ctypes
import enum
import errno
import json
import os
import platform
import resource
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.launcher_info import has_ended, rank_lost_error
from meshwise.comm.shared_memory.shared_segment import (
    JointTensors,
    PeerMappings,
    SharedSegment,
    TensorSlabs,
    open_segment,
)

PAYLOAD_BYTES = 64 << 10
"""Room on the board for the tensors of one call, in bytes. Other ranks read larger tensors in place."""

PAYLOAD_WORDS = PAYLOAD_BYTES // 8
"""Words of one payload. Queues and payloads begin at multiples of this number."""

# Bytes of address space of a board. A queue uses about 2 MB of memory, supplied by the system at its first use. Every
# rank maps the board of every other rank, so boards are smaller where address space is limited (`ulimit -v`).
_BYTES, _BYTES_OF_FEW = 1 << 32, 1 << 30
_NUM_QUEUES, _TABLE, _MOST_QUEUES = 8, 16, 2000
_FIRST_QUEUE = _TABLE + 2 * _MOST_QUEUES
_MOST_VIEWS = 4096
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
_WAIT, _WAKE, _EVERYBODY = 0, 1, 1 << 30
_syscall = ctypes.CDLL(None).syscall


_PROOF_WORD = 1

# How long to sleep before this rank looks for ended ranks. It must be short: a launcher ends all ranks soon after one
# has ended, and each should report the loss first. The second number is for `Progress.LATER`.
_SLEEP_SECONDS = 0.005
_LATER_SECONDS = 0.001

# Wakes in vain, by calls that a rank does not wait for, after which it sleeps for a fixed time.
_MOST_VAIN_WAKES = 16
_BACK_OFF_SECONDS = 0.0002

# How long a process may take to end after its memory is freed; and the errors that other ranks get meanwhile: no such
# file, or None (an OSError of this package: another process has the PID).
_ENDING_SECONDS = 10.0
_OF_AN_END = (errno.ENOENT, None)


class Board:
    """Shared memory with the counters, queues and small tensors of one rank, its owner. Only the owner writes there."""

    def __init__(self, memory: Tensor, *, place: int, segment: SharedSegment | None = None) -> None:
        """Use the bytes `memory`. place: `SharedSegment.place`. segment: None in processes other than the owner's."""
        self.place = place
        self._segment = segment
        self.words = memoryview(memory.numpy()).cast("q")  # type: ignore[arg-type] # an array is a buffer
        self.address = memory.data_ptr()
        self.view = lru_cache(_MOST_VIEWS)(lambda offset, size, dtype: memory[offset : offset + size].view(dtype))
        """Function (offset, bytes, dtype) → tensor over these bytes. Cached, because payloads often repeat offsets."""
        self._bell = ctypes.c_void_p(self.address)
        self._lock = threading.Lock()
        self._queues: dict[int, int] = {}
        self._end = _FIRST_QUEUE

    @classmethod
    def make(cls) -> "Board":
        """Return a new board, owned by this rank. Raises OSError when the system refuses shared memory."""
        few = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        segment = SharedSegment.make(0, size=_BYTES_OF_FEW if few else _BYTES)
        return cls(segment.memory, place=segment.place, segment=segment)

    def hide(self) -> None:
        """Close the file descriptor of this rank's board. No further process can map it; existing mappings stay."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    # ---- queues -------------------------------------------------------------------------------------------------

    def add_queue(self, key: int, *, words: int) -> int:
        """Reserve `words` words for the queue `key` on this rank's board, and return the index of the first word."""
        count, start = self.words[_NUM_QUEUES], -(-self._end // PAYLOAD_WORDS) * PAYLOAD_WORDS
        assert count < _MOST_QUEUES, "the board is full of queues"
        assert start + words <= len(self.words), "the board is full of queues"
        self._end = start + words
        self.words[_TABLE + 2 * count] = key
        self.words[_TABLE + 2 * count + 1] = start
        self.publish(_NUM_QUEUES, value=count + 1)
        self._queues[key] = start
        return start

    def queue_start(self, key: int) -> int | None:
        """Return the index of the first word of queue `key`, or None before the owner's first call in this queue."""
        if key not in self._queues:
            for at in range(len(self._queues), self.read(_NUM_QUEUES)):
                self._queues[self.words[_TABLE + 2 * at]] = self.words[_TABLE + 2 * at + 1]
        return self._queues.get(key)

    # ---- counters ----------------------------------------------------------------------------------------------

    def publish(self, word: int, *, value: int) -> None:
        """Write a counter. A rank that reads the new value also sees everything that this rank wrote before."""
        if not _KEEPS_ORDER:
            self._order()
        self.words[word] = value

    def read(self, word: int) -> int:
        """Return a counter. Afterwards this rank sees everything that the owner wrote before the counter."""
        value = self.words[word]
        if not _KEEPS_ORDER:
            self._order()
        return value

    def _order(self) -> None:
        for _ in range(2):
            with self._lock:
                pass

    # ---- sleeping and waking -----------------------------------------------------------------------------------

    @property
    def bell(self) -> int:
        """Number that every `ring` changes."""
        return self.words[0]

    def ring(self) -> None:
        """Change the bell, and wake the ranks that sleep on this board."""
        self.words[0] = (self.words[0] + 1) & 0x7FFFFFFF
        if _FUTEX is not None:
            _syscall(_FUTEX, self._bell, _WAKE, _EVERYBODY)

    def sleep(self, seen: int, *, seconds: float) -> None:
        """Sleep until the bell differs from `seen`, at most for `seconds`. The sleep may also end earlier."""
        if _FUTEX is None:
            time.sleep(min(100e-6, seconds))
        elif self.words[0] == seen:
            most = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))  # C's `struct timespec`
            _syscall(_FUTEX, self._bell, _WAIT, ctypes.c_int(seen), ctypes.byref(most), None, 0)


class Progress(enum.IntEnum):
    """Result of an attempt of a waiting rank to do its part of other calls."""

    NOTHING = 0
    """This rank has no part left to do."""
    LATER = 1
    """This rank has a part left, but another rank has not posted the call yet."""
    DID = 2
    """This rank did a part of a call."""


@dataclass(frozen=True)
class HostPeer:
    """Another rank of this host: its PID, its board, and its shared segments as this process maps them."""

    rank: int
    process: int
    board: Board
    segments: PeerMappings


class HostConnection:
    """Connection of one rank with the other ranks of its host.

    | board           this rank's own board
    | peers           the other ranks of the host, by rank
    | slabs           shared memory for this rank's tensors
    | joint_tensors   tensors whose memory several ranks share"""

    def __init__(self, rank: int, *, board: Board, peers: Sequence[HostPeer]) -> None:
        self.rank = rank
        self.board = board
        self.slabs = TensorSlabs()
        self.joint_tensors = JointTensors()
        self.peers = {peer.rank: peer for peer in peers}

    @classmethod
    def enter(cls, store: c10d.Store, *, rank: int, ranks: Sequence[int]) -> "HostConnection":
        """Make this rank's board, map the boards of `ranks`, all on one host, and return the connection. Each of these
        ranks calls this method with the same store. Raises OSError when a rank has no board or cannot map a board."""
        board, own = None, ""
        try:
            board = Board.make()
            proof = secrets.randbits(62)
            board.words[_PROOF_WORD] = proof
            own = json.dumps([os.getpid(), board.place, proof])
        except OSError as error:
            own = json.dumps(str(error))
        store.set(f"board/{rank}", own)
        found = store.multi_get([f"board/{other}" for other in ranks])
        peers = [_peer(other, text.decode()) for other, text in zip(ranks, found, strict=True) if other != rank]
        if board is None:
            raise OSError(f"rank {rank}: {json.loads(own)}")
        return cls(rank, board=board, peers=peers)

    def wait_for(
        self,
        rank: int,
        *,
        condition: Callable[[], bool],
        among: Sequence[int],
        about: CallRecord,
        meanwhile: Callable[[], Progress],
    ) -> None:
        """Block until `condition` is true.

        | rank        the rank that makes the condition true; this rank sleeps until its bell rings
        | among       ranks of the call; while this rank waits, it checks for their end
        | about       record of the call that waits, for the message of the error
        | meanwhile   called before each sleep; does this rank's part of other calls, as far as it can

        Raises RankLostError when a rank of `among` has ended and the condition is still false."""
        for poll in range(40):
            if poll >= 10:
                os.sched_yield()  # another rank may need this core
            if condition():
                return
        board, wakes = self.peers[rank].board, 0
        while True:
            seen = board.bell
            if condition():
                return
            outlook = meanwhile()
            if outlook is not Progress.DID:
                if wakes < _MOST_VAIN_WAKES:
                    board.sleep(seen, seconds=_LATER_SECONDS if outlook is Progress.LATER else _SLEEP_SECONDS)
                else:
                    time.sleep(_BACK_OFF_SECONDS)
            wakes = 0 if board.bell == seen else wakes + 1
            if board.bell == seen:
                gone = self.ended_rank(among)
                if gone is not None and not condition():
                    raise rank_lost_error(gone, about=about, error=OSError("its process has ended"))

    def leave(self) -> None:
        """Close this rank's file descriptors, when no rank waits any more: no rank can map its board afterwards."""
        self.board.hide()
        self.slabs.keep_none()

    def ended_rank(self, ranks: Sequence[int]) -> int | None:
        """Return the first of `ranks` whose process has ended, or None. This rank itself may be among them."""
        return next((rank for rank in ranks if rank != self.rank and has_ended(self.peers[rank].process)), None)

    def ended_rank_behind(self, ranks: Sequence[int], *, error: OSError) -> int | None:
        """Return the first of `ranks` whose process has ended, or None. error: raised by an access to their memory. The
        system frees the memory of an ending process first; for large memory the end is visible only seconds later. So
        if the end of a process may be the cause of `error`, wait up to 10 s until the end is visible."""
        deadline = time.monotonic() + (_ENDING_SECONDS if error.errno in _OF_AN_END else 0)
        while (gone := self.ended_rank(ranks)) is None and time.monotonic() < deadline:
            time.sleep(_SLEEP_SECONDS)
        return gone


def _peer(rank: int, text: str) -> HostPeer:
    """Return the peer `rank`, from its stored text with PID, place of board and proof number. Raises OSError when that
    rank has no board, or when this rank cannot map the board."""
    entry = json.loads(text)
    if isinstance(entry, str):
        raise OSError(f"rank {rank}: {entry}")
    process, place, proof = entry
    board = Board(open_segment(process, place=place), place=place)
    if board.words[_PROOF_WORD] != proof:
        raise OSError(f"PID {process} is another process here than for rank {rank}; are there two PID namespaces?")
    return HostPeer(rank, process, board, PeerMappings(process))

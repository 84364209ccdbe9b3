"""Connect this rank with the other ranks of its host: map their boards, wait for them, notice when one has ended."""

import enum
import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed import distributed_c10d as c10d

from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.private_buffers import PrivateBuffers
from meshwise.comm.api.process_life import ProcessLife
from meshwise.comm.api.rank_lost import lost
from meshwise.comm.shared_memory.board import Board
from meshwise.comm.shared_memory.process_memory import ProcessMemory
from meshwise.comm.shared_memory.segment import JointTensors, PeerMappings, TensorSlabs

_PROOF_WORD = 1
# Number of polls of a condition, then number of polls after a yield each, because another rank may need this core.
_LOOKS = 10
_YIELDS = 30
# How long to sleep before this rank looks for ended ranks. It must be short: a launcher that notices an ended rank soon
# ends all ranks, and each should report the loss first. The nap is for ranks with other calls that may become due.
_SLEEP_SECONDS = 0.005
_NAP_SECONDS = 0.001
# A rank that makes a call wakes all ranks that sleep on its board, even if they wait for another call. After this
# number of wakes in vain, a waiting rank sleeps for a fixed time instead, which costs the calling rank nothing.
_MOST_VAIN_WAKES = 16
_BACK_OFF_SECONDS = 0.0002
# How long a process may take to end after its memory is freed; and the errors that other ranks get meanwhile: no such
# process, no such file, or None (an OSError of this package: another process has the PID).
_ENDING_SECONDS = 10.0
_OF_AN_END = (errno.ESRCH, errno.ENOENT, None)


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
    """Another rank of this host: its process, its board, and its shared segments as this process maps them."""

    rank: int
    life: ProcessLife
    board: Board
    slabs: PeerMappings


class HostConnection:
    """Connection of one rank with the other ranks of its host.

    | board           this rank's own board
    | slabs           shared memory for this rank's tensors
    | joint_tensors   tensors whose memory several ranks share
    | memory          access to private memory of other ranks; None if no rank can read another rank's memory
    | scratch         buffers for intermediate sums"""

    def __init__(self, rank: int, *, board: Board, peers: Sequence[HostPeer], memory: ProcessMemory | None) -> None:
        self.rank = rank
        self.board = board
        self.slabs = TensorSlabs()
        self.joint_tensors = JointTensors()
        self.memory = memory
        self.scratch = PrivateBuffers()
        self._peers = {peer.rank: peer for peer in peers}

    @classmethod
    def enter(
        cls, store: c10d.Store, *, rank: int, ranks: Sequence[int], memory: ProcessMemory | None
    ) -> "HostConnection":
        """Return this rank's connection with `ranks`, the ranks of one host; each of them calls this over one store.
        Makes this rank's board and maps the other boards. Raises OSError when a rank has no board or cannot map one."""
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
        return cls(rank, board=board, peers=peers, memory=memory)

    def peer(self, rank: int) -> HostPeer:
        """Return the peer with the number `rank` in the world."""
        return self._peers[rank]

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
        for _ in range(_LOOKS):
            if condition():
                return
        for _ in range(_YIELDS):
            os.sched_yield()
            if condition():
                return
        board, wakes = self._peers[rank].board, 0
        while True:
            seen = board.bell
            if condition():
                return
            outlook = meanwhile()
            if outlook is not Progress.DID:
                if wakes < _MOST_VAIN_WAKES:
                    board.sleep(seen, seconds=_NAP_SECONDS if outlook is Progress.LATER else _SLEEP_SECONDS)
                else:
                    time.sleep(_BACK_OFF_SECONDS)
            wakes = 0 if board.bell == seen else wakes + 1
            if board.bell == seen:
                gone = self.missing(among)
                if gone is not None and not condition():
                    raise lost(gone, about=about, error=OSError("its process has ended"))

    def leave(self) -> None:
        """Close this rank's file descriptors for shared memory and for the other processes. Call it when no rank waits
        any more, because afterwards no rank can map this rank's board or notice the end of another rank."""
        self.board.hide()
        self.slabs.keep_none()
        for peer in self._peers.values():
            peer.life.close()

    def missing(self, ranks: Sequence[int]) -> int | None:
        """Return the first of `ranks` whose process has ended, or None. This rank itself may be among them."""
        return next((rank for rank in ranks if rank != self.rank and self._peers[rank].life.ended), None)

    def lost_by(self, ranks: Sequence[int], *, error: OSError) -> int | None:
        """Return the first of `ranks` whose process has ended, or None. error: raised by an access to their memory. The
        system frees the memory of an ending process first; for large memory the end is visible only seconds later. So
        if `error` may be due to an end, the method waits for it up to 10 s."""
        deadline = time.monotonic() + (_ENDING_SECONDS if error.errno in _OF_AN_END else 0)
        while (gone := self.missing(ranks)) is None and time.monotonic() < deadline:
            time.sleep(_SLEEP_SECONDS)
        return gone


def _peer(rank: int, text: str) -> HostPeer:
    """Return the peer `rank`, from its stored text with PID, place of board and proof number. Raises OSError when that
    rank has no board, or when this rank cannot map the board."""
    entry = json.loads(text)
    if isinstance(entry, str):
        raise OSError(f"rank {rank}: {entry}")
    process, place, proof = entry
    board = Board.open(process, place=place)
    if board.words[_PROOF_WORD] != proof:
        raise OSError(f"PID {process} is another process here than for rank {rank}; are there two PID namespaces?")
    return HostPeer(rank, ProcessLife(process), board, PeerMappings(process))

"""Join the ranks of one host: they find each other's memory, wait for each other, and notice lost ranks."""

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
from meshwise.comm.api.process_life import ProcessLife
from meshwise.comm.api.rank_lost import lost
from meshwise.comm.shared_memory.board import Board
from meshwise.comm.shared_memory.process_memory import ProcessMemory
from meshwise.comm.shared_memory.scratch_memory import ScratchMemory
from meshwise.comm.shared_memory.segment import JointTensors, PeerMappings, TensorSlabs

_PROOF_WORD = 1
# How often to look, and how often to let others run and look again: another rank may wait for this very core.
_LOOKS = 10
_YIELDS = 30
# How long to sleep before looking whether the others live (a launcher that sees one die soon ends the rest, and they
# have something to say), and when other work may become due meanwhile.
_SLEEP_SECONDS = 0.005
_NAP_SECONDS = 0.001
# A rank rings at every call and wakes all ranks that sleep on its board, also those that wait for another call. A rank
# that was woken in vain this often sleeps for a fixed time instead, which costs the ringing rank nothing.
_MOST_VAIN_WAKES = 16
_BACK_OFF_SECONDS = 0.0002
# How long a process may take to end once its memory has gone, and the errors that other ranks get then: no process, no
# file of it, or another process in its place.
_ENDING_SECONDS = 10.0
_OF_AN_END = (errno.ESRCH, errno.ENOENT, None)


class Progress(enum.IntEnum):
    """Progress of a waiting rank: nothing to do, something may arrive, or something was done."""

    NOTHING = 0
    LATER = 1
    DID = 2


@dataclass(frozen=True)
class HostPeer:
    """Another rank of this host."""

    rank: int
    life: ProcessLife
    board: Board
    slabs: PeerMappings


class HostRanks:
    """State that a rank shares with the other ranks of its host. memory: which ranks can read each other's private
    memory; None if none can.
    """

    def __init__(self, rank: int, *, board: Board, peers: Sequence[HostPeer], memory: ProcessMemory | None) -> None:
        self.rank = rank
        self.board = board
        self.slabs = TensorSlabs()
        self.joint_tensors = JointTensors()
        self.memory = memory
        self.scratch = ScratchMemory()
        self._peers = {peer.rank: peer for peer in peers}

    @classmethod
    def enter(cls, store: c10d.Store, *, rank: int, ranks: Sequence[int], memory: ProcessMemory | None) -> "HostRanks":
        """Map the boards of `ranks`; all of them call this over the same store. Raises OSError."""
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
        """Return the peer of this rank number."""
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
        """Return when `condition`, which depends on another rank, is true.

        Raises RankLostError when a rank of `among` has ended and `condition` is still false.
        """
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
        """Close the file descriptors of the sharing. No rank waits any more, and none joins."""
        self.board.hide()
        self.slabs.keep_none()
        for peer in self._peers.values():
            peer.life.forget()

    def missing(self, ranks: Sequence[int]) -> int | None:
        """Return the first of these ranks whose process has ended, if any has."""
        return next((rank for rank in ranks if rank != self.rank and self._peers[rank].life.ended), None)

    def lost_by(self, ranks: Sequence[int], *, error: OSError) -> int | None:
        """Return the first of `ranks` that has ended, or None.

        The memory of a process goes before its end is visible, seconds before when it is large. Where `error` may come
        from that, this waits for the end.
        """
        deadline = time.monotonic() + (_ENDING_SECONDS if error.errno in _OF_AN_END else 0)
        while (gone := self.missing(ranks)) is None and time.monotonic() < deadline:
            time.sleep(_SLEEP_SECONDS)
        return gone


def _peer(rank: int, text: str) -> HostPeer:
    """Return the peer of a rank. Raises OSError when that rank has no board, or this rank cannot map it."""
    entry = json.loads(text)
    if isinstance(entry, str):
        raise OSError(f"rank {rank}: {entry}")
    process, place, proof = entry
    board = Board.open(process, place=place)
    if board.words[_PROOF_WORD] != proof:
        raise OSError(f"process {process} is another one here than for rank {rank}")
    return HostPeer(rank, ProcessLife(process), board, PeerMappings(process))

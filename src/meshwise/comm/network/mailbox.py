"""Messages between the processes of a job.

gloo's own collectives copy more than they need, queue behind each other on two threads and sum in an order that depends
on the size. When two ranks disagree about a size they end the process (SIGABRT). Its sends and receives have none of
this: they are under way when the call returns, any number at once, straight from and into the tensors.

    | 64 MB, 4 processes, CPU ms a rank     all-reduce   reduce-scatter   all-gather   broadcast
    | gloo's collectives                    58 to 81     114 to 135       77 to 99     27 to 43
    | messages                              55 to 74     32 to 40         30           48

Every message carries a tag made of what the rank believes it is calling (ranks, kind, operation, phase, size, dtype).
Ranks that disagree therefore never take each other's bytes: they wait, and the hang report finds out who differs.
"""

import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshwise.comm.api.rank_lost import lost
from meshwise.comm.network.loopback import LOOPBACK, address_towards

_FOREVER = timedelta(days=30)
_TAG_BITS = 0x7FFFFFFF


@dataclass(frozen=True)
class _Pending:
    """One send or receive under way. It keeps its tensor alive."""

    peer: int
    tensor: Tensor
    complete: Callable[[], Any]


@dataclass(frozen=True)
class PendingMessages:
    """Sends and receives under way."""

    pending: Sequence[_Pending]
    about: object

    def wait(self) -> None:
        """Block until all of them are complete. Raises RankLostError."""
        for message in self.pending:
            try:
                message.complete()
            except RuntimeError as error:
                raise lost(message.peer, about=self.about, error=error) from error


class Mailbox:
    """The messages of one process. Every process of the job makes one, over the same store."""

    def __init__(self, store: c10d.Store, *, rank: int, size: int) -> None:
        self._group: c10d.ProcessGroup | None = _gloo(store, rank, size)

    @property
    def closed(self) -> bool:
        """True if `close` was called."""
        return self._group is None

    def post(
        self,
        *,
        sends: Iterable[tuple[int, Tensor]],
        receives: Iterable[tuple[int, Tensor]],
        label: str,
        about: object,
    ) -> PendingMessages:
        """Start these messages, (rank, contiguous CPU tensor) each; empty tensors need none.

        A receive takes the first message from that rank with the same label, size and dtype that no earlier receive
        took. `about` is what an error names. Raises RankLostError.
        """
        pending = []
        for start, messages in ((self._receive, receives), (self._send, sends)):
            for peer, tensor in messages:
                if tensor.numel():
                    try:
                        pending.append(start(peer, tensor, label))
                    except RuntimeError as error:
                        raise lost(peer, about=about, error=error) from error
        return PendingMessages(pending, about)

    def close(self) -> None:
        """Close the connections. Messages still under way fail."""
        self._group = None

    def _send(self, peer: int, tensor: Tensor, label: str) -> _Pending:
        assert self._group is not None, "the world was closed"
        return _Pending(peer, tensor, self._group.send([tensor], peer, _tag(label, tensor)).wait)

    def _receive(self, peer: int, tensor: Tensor, label: str) -> _Pending:
        assert self._group is not None, "the world was closed"
        return _Pending(peer, tensor, self._group.recv([tensor], peer, _tag(label, tensor)).wait)


def _tag(label: str, tensor: Tensor) -> int:
    """Return the number by which a message is known: of what the rank believes it calls, the size and the dtype."""
    return zlib.crc32(f"{label} {tensor.numel()} {tensor.dtype}".encode()) & _TAG_BITS


def _gloo(store: c10d.Store, rank: int, size: int) -> c10d.ProcessGroup:
    """Return a gloo process group of our own: torch's default group stays free for the user."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        backend = c10d.ProcessGroupGloo(store, rank, size, _FOREVER)
    else:
        # By default gloo listens where the host's own name leads, which may be anywhere, or nowhere.
        together = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
        address = LOOPBACK if together else address_towards(os.environ["MASTER_ADDR"])
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stubs
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
        options._threads = 1
        options._timeout = _FOREVER
        backend = c10d.ProcessGroupGloo(store, rank, size, options)
    group = c10d.ProcessGroup(store, rank, size)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backend)
    return group

"""Messages between the processes of a job, over gloo.

gloo's own collectives copy more than they need (an all-gather of 64 MB among 4 processes takes 116 to 142 ms, the same
bytes as plain messages 38 ms), queue behind each other on two threads, sum in an order that depends on the size, and
end the process (SIGABRT) when two ranks disagree about a size. Its sends and receives have none of this: they are under
way when the call returns, any number at once, straight from and into the tensors.

Every message carries a tag made of what the rank believes it is calling (ranks, kind, operation, phase, size, dtype).
Ranks that disagree therefore never take each other's bytes: they wait, and the hang report finds out who differs.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

_FOREVER = timedelta(days=30)
_TAG_BITS = 0x7FFFFFFF


class RankLostError(RuntimeError):
    """Another rank ended, or its connection broke, while this one was in a collective."""


@dataclass(frozen=True)
class Messages:
    """Sends and receives under way, each with the rank at the other end. They keep their tensors alive."""

    pending: Sequence[tuple[c10d.Work, int]]
    about: object

    def wait(self) -> None:
        """Block until all of them are complete. Raises RankLostError."""
        for work, peer in self.pending:
            try:
                work.wait()
            except RuntimeError as error:
                raise _lost(peer, self.about, error) from error


class Mailbox:
    """One process's end of the messages. Every process of the job makes one, over the same store."""

    def __init__(self, store: c10d.Store, *, rank: int, size: int) -> None:
        self._group: c10d.ProcessGroup | None = _gloo(store, rank, size)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._group is None

    def post(
        self,
        *,
        sends: Iterable[tuple[int, Tensor]],
        receives: Iterable[tuple[int, Tensor]],
        label: str,
        about: object,
    ) -> Messages:
        """Start these messages, (rank, contiguous CPU tensor) each; empty tensors need none.

        A receive takes the first message from that rank with the same label, size and dtype that no earlier receive
        took. `about` is what an error names. Raises RankLostError.
        """
        assert self._group is not None, "the world was closed"
        pending = []
        for start, messages in ((self._group.recv, receives), (self._group.send, sends)):
            for peer, tensor in messages:
                if tensor.numel():
                    try:
                        pending.append((start([tensor], peer, _tag(label, tensor)), peer))
                    except RuntimeError as error:
                        raise _lost(peer, about, error) from error
        return Messages(pending, about)

    def close(self) -> None:
        """Close the connections. Messages still under way fail."""
        self._group = None


def _tag(label: str, tensor: Tensor) -> int:
    return zlib.crc32(f"{label} {tensor.numel()} {tensor.dtype}".encode()) & _TAG_BITS


def _lost(peer: int, about: object, error: RuntimeError) -> RankLostError:
    what = re.sub(r"^\[.*?\] | This is typically.*$", "", str(error), flags=re.DOTALL)
    return RankLostError(f"rank {peer} was lost in {about} ({what.rstrip('.')})")


def _gloo(store: c10d.Store, rank: int, size: int) -> c10d.ProcessGroup:
    """A gloo process group of our own: torch's default group stays free for the user."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stubs
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._threads = 1
        options._timeout = _FOREVER
        backend = c10d.ProcessGroupGloo(store, rank, size, options)
    else:
        backend = c10d.ProcessGroupGloo(store, rank, size, _FOREVER)
    group = c10d.ProcessGroup(store, rank, size)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backend)
    return group

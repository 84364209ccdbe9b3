"""Messages between the processes of a job.

gloo's own collectives copy more than they need, queue behind each other on two threads, sum in an order that depends on
the size, and end the process (SIGABRT) when two ranks disagree about a size. Its sends and receives have none of this:
they are under way when the call returns, any number at once, straight from and into the tensors. Large ones between
processes of one machine only carry an address, and the receiver reads the sender's memory (see `direct`).

    64 MB, 4 processes, CPU ms a rank     all-reduce   reduce-scatter   all-gather   broadcast
    gloo's collectives                    58 to 81     114 to 135       77 to 99     27 to 43
    messages through sockets              55 to 74     32 to 40         30           48
    messages read from memory             29           20               15           10

Every message carries a tag made of what the rank believes it is calling (ranks, kind, operation, phase, size, dtype).
Ranks that disagree therefore never take each other's bytes: they wait, and the hang report finds out who differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshwise.comm.direct import Memory
from meshwise.comm.lost import lost
from meshwise.comm.window import Window, tag

_FOREVER = timedelta(days=30)
DIRECT_BYTES = 1 << 20


@dataclass(frozen=True)
class _Pending:
    """One send or receive under way. It keeps its tensor alive."""

    peer: int
    tensor: Tensor
    complete: Callable[[], Any]
    direct: bool = False


@dataclass(frozen=True)
class Messages:
    """Sends and receives under way."""

    pending: Sequence[_Pending]
    about: object

    @classmethod
    def openings(cls, windows: Iterable[Window], *, about: object) -> Messages:
        """The messages after which the windows can be read."""
        return cls([_Pending(window.peer, window.address, window.open, direct=True) for window in windows], about)

    @property
    def direct(self) -> bool:
        """Whether some are read straight from the sender's memory, which only goes on while the receiver waits."""
        return any(message.direct for message in self.pending)

    def wait(self) -> None:
        """Block until all of them are complete. Raises RankLostError."""
        for message in self.pending:
            try:
                message.complete()
            except (RuntimeError, OSError) as error:
                raise lost(message.peer, about=self.about, error=error) from error


class Mailbox:
    """One process's end of the messages. Every process of the job makes one, over the same store.

    `memory`: who can read whose, if large messages may be read straight from the sender's memory.
    """

    def __init__(self, store: c10d.Store, *, rank: int, size: int, memory: Memory | None = None) -> None:
        self._memory = memory
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
        pending = []
        for start, messages in ((self._receive, receives), (self._send, sends)):
            for peer, tensor in messages:
                if tensor.numel():
                    try:
                        pending.append(start(peer, tensor, label))
                    except RuntimeError as error:
                        raise lost(peer, about=about, error=error) from error
        return Messages(pending, about)

    def windows(self, peers: Mapping[int, int], *, like: Tensor, label: str, about: object) -> dict[int, Window] | None:
        """By the same keys, windows on what each of `peers` sends under `label`, of the size and dtype of `like`.

        None where some of it has to be received: it is small, or not to be read from memory. Raises RankLostError.
        """
        if not all(self._can_read(peer, like) for peer in peers.values()):
            return None
        windows = {}
        for key, peer in peers.items():
            try:
                windows[key] = self._window(peer, like, label)
            except RuntimeError as error:
                raise lost(peer, about=about, error=error) from error
        return windows

    def _can_read(self, peer: int, tensor: Tensor) -> bool:
        return self._memory is not None and self._memory.readable(peer) and _is_large(tensor)

    def _window(self, peer: int, like: Tensor, label: str) -> Window:
        assert self._group is not None, "the world was closed"
        assert self._memory is not None
        return Window(self._group, memory=self._memory, peer=peer, like=like, label=label)

    def close(self) -> None:
        """Close the connections. Messages still under way fail."""
        self._group = None

    def _send(self, peer: int, tensor: Tensor, label: str) -> _Pending:
        assert self._group is not None, "the world was closed"
        number = tag(label, tensor=tensor)
        if not (self._memory and self._memory.read_by(peer) and _is_large(tensor)):
            return _Pending(peer, tensor, self._group.send([tensor], peer, number).wait)
        sent = self._group.send([torch.tensor([tensor.data_ptr()])], peer, number)
        taken = self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, tag(f"{label} taken", tensor=tensor))

        def complete() -> None:
            sent.wait()
            taken.wait()

        return _Pending(peer, tensor, complete, direct=True)

    def _receive(self, peer: int, tensor: Tensor, label: str) -> _Pending:
        assert self._group is not None, "the world was closed"
        if not self._can_read(peer, tensor):
            return _Pending(peer, tensor, self._group.recv([tensor], peer, tag(label, tensor=tensor)).wait)
        window = self._window(peer, tensor, label)

        def complete() -> None:
            window.open()
            window.read(0, into=tensor)
            window.close()

        return _Pending(peer, tensor, complete, direct=True)


def _is_large(tensor: Tensor) -> bool:
    """Whether reading it from the sender's memory pays for the two small messages around that."""
    return tensor.numel() * tensor.element_size() >= DIRECT_BYTES


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

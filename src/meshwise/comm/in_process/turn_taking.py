"""Taking turns: of the threads of a run, one computes while the others wait for theirs.

Torch lets go of Python's lock in every operation. Threads that compute at the same time hand Python's lock over at each
operation, which costs more than a small operation. The grid of tensor parallelism, up to 8 ranks on two cores, takes
110 s that way and 50 s in turns.

A turn lasts until its thread waits for another rank. Correctness does not depend on it: a thread that has waited for a
second continues beside the one whose turn it is. So long operations use all cores, and a rank that waits in a way of
its own blocks no rank for good.
"""

from __future__ import annotations

import threading

_PATIENCE_SECONDS = 1.0


class TurnTaking:
    """The turn of one thread to compute. Threads that have not entered are not held up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._members: set[int] = set()

    def __enter__(self) -> None:
        """Join the threads that take turns."""
        self._members.add(threading.get_ident())
        self.take()

    def __exit__(self, *_: object) -> None:
        """Leave the threads that take turns."""
        self.give()
        self._members.discard(threading.get_ident())

    def take(self) -> None:
        """Wait until it is this thread's turn, but not for long."""
        if threading.get_ident() in self._members and self._lock.acquire(timeout=_PATIENCE_SECONDS):
            self._holder = threading.get_ident()

    def give(self) -> None:
        """Let another thread have its turn, if it was this one's."""
        if self._holder == threading.get_ident():
            self._holder = None
            self._lock.release()

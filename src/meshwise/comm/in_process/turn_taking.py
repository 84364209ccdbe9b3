"""Taking turns: of the threads of a run, one computes while the others wait for theirs.

Torch lets go of Python's lock in every operation. Threads that compute at the same time then pass it around with each
of them, which for small operations costs more than the operations: the grid of tensor parallelism, up to 8 ranks on two
cores, takes 110 s so and 50 s in turns.

A turn lasts until its thread waits for another rank. Nothing depends on it: who has waited for a second goes on beside
the one whose turn it is, so that long operations use all cores, and a rank that waits for another in a way of its own
holds up nobody for good.
"""

from __future__ import annotations

import threading

_PATIENCE_SECONDS = 1.0


class TurnTaking:
    """Whose turn it is. Threads that have not entered are not held up."""

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

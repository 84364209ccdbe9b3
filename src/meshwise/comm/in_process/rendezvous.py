"""Match the collectives of ranks that are threads of one process, and find calls that can never be completed."""

import threading
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from meshwise.comm.api.flat_parts import reduce_in_order
from meshwise.comm.api.flight_recorder import CallRecord, RanksDisagree, disagreement, ranks_text
from meshwise.comm.api.python_stacks import stack_of

_PATIENCE_SECONDS = 1.0


class TurnTaking:
    """Lock that lets one of several threads compute at a time. A thread takes part inside a `with` block."""

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
        """Wait at most a second for this thread's turn; after that, continue without the turn."""
        if threading.get_ident() in self._members and self._lock.acquire(timeout=_PATIENCE_SECONDS):
            self._holder = threading.get_ident()

    def give(self) -> None:
        """End this thread's turn, if it has the turn."""
        if self._holder == threading.get_ident():
            self._holder = None
            self._lock.release()


class RunEnded(BaseException):
    """Raised in a rank whose run has failed, to end the rank. Not an Exception: `except Exception` must not stop it."""


class PendingCollective:
    """One collective, or one send with its recv: the records of the ranks' calls, and copies of their tensors."""

    def __init__(self, ranks: tuple[int, ...], *, changed: threading.Condition) -> None:
        """Make a collective of `ranks` without calls. changed: notified when all have called, or the run fails."""
        self.ranks = ranks
        self.records: dict[int, CallRecord] = {}
        self.changed = changed
        self._deposits: dict[int, Mapping[int, Tensor]] = {}
        self._reduced: Tensor | None = None
        self._reducing = threading.Lock()

    def arrive(self, rank: int, *, record: CallRecord, deposit: Mapping[int, Tensor]) -> None:
        """Add the call of `rank`. deposit: copies of its tensors, by the index of the rank that takes each."""
        self.records[rank] = record
        self._deposits[rank] = deposit

    def complete(self) -> bool:
        """Return True if every rank has called the collective."""
        return len(self.records) == len(self.ranks)

    def missing(self) -> list[int]:
        """Return the ranks that have not called the collective."""
        return [rank for rank in self.ranks if rank not in self.records]

    def reduced(self, op: str) -> Tensor:
        """Return the reduction of the ranks' first tensors; computed at the first call, for all ranks."""
        with self._reducing:
            if self._reduced is None:
                self._reduced = torch.empty_like(self._deposits[self.ranks[0]][0])
                self.reduce(op, into=self._reduced)
            return self._reduced

    def reduce(self, op: str, *, into: Tensor, part: int = 0) -> None:
        """Reduce tensor `part` of every rank into `into`, in group order. Raises RanksDisagree if sizes differ."""
        parts = [self._fitting(index, part, into) for index in range(len(self.ranks))]
        reduce_in_order(parts, into=into, scratch=torch.empty_like(into), op=op)

    def place(self, target: Tensor, *, index: int, part: int = 0) -> None:
        """Copy tensor `part` of group index `index` into `target`. Raises RanksDisagree if sizes differ."""
        target.copy_(self._fitting(index, part, target))

    def _fitting(self, index: int, part: int, target: Tensor) -> Tensor:
        source = self._deposits[self.ranks[index]][part]
        if source.numel() != target.numel() or source.dtype != target.dtype:
            raise RanksDisagree(
                f"rank {self.ranks[index]} gives {source.numel()} elements of {source.dtype} where "
                f"{target.numel()} of {target.dtype} are expected; its call is {self.records[self.ranks[index]]}"
            )
        return source


class Rendezvous:
    """Meeting point of the ranks of a run: their pending collectives, waiting and finished ranks, under one lock.
    timeout: seconds that a rank may wait in one collective; None for no limit."""

    def __init__(self, size: int, *, timeout: float | None) -> None:
        self.size = size
        self.timeout = timeout
        self.turn = TurnTaking()
        self.threads: list[threading.Thread] = []
        self.failure: BaseException | None = None
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)
        self._pending: dict[tuple[bool, tuple[int, ...], int], PendingCollective] = {}
        self._calls: dict[tuple[int, bool, tuple[int, ...]], int] = {}
        self._waiting: dict[int, PendingCollective] = {}
        self._finished: set[int] = set()

    def meet(
        self, rank: int, *, ranks: tuple[int, ...], record: CallRecord, deposit: Mapping[int, Tensor]
    ) -> PendingCollective:
        """Add this rank's next call among `ranks`, and return the collective to which the call belongs. For a send or
        recv, `ranks` are source and target. deposit: copies of this rank's tensors. Raises RunEnded when the run has
        failed, or because the records of the ranks disagree."""
        line = record.point_to_point
        with self._lock:
            self._end_if_failed()
            ordinal = self._calls.get((rank, line, ranks), 0)
            self._calls[rank, line, ranks] = ordinal + 1
            pending = self._pending.get((line, ranks, ordinal))
            if pending is None:
                pending = PendingCollective(ranks, changed=threading.Condition(self._lock))
                self._pending[line, ranks, ordinal] = pending
            pending.arrive(rank, record=record, deposit=deposit)
            if table := disagreement(pending.records):
                self._fail(RanksDisagree(f"the ranks called different collectives:\n{table}"))
                raise RunEnded
            if pending.complete():
                del self._pending[line, ranks, ordinal]
                for other in ranks:
                    if self._waiting.get(other) is pending:
                        del self._waiting[other]
                pending.changed.notify_all()
            return pending

    def wait(self, pending: PendingCollective, *, rank: int) -> None:
        """Block until every rank has called the collective. Raises RunEnded when the run has failed."""
        ends = None if self.timeout is None else time.monotonic() + self.timeout
        with self._lock:
            self._end_if_failed()
            if pending.complete():
                return
            self._waiting[rank] = pending
            self._look_for_the_impossible()
            self.turn.give()
            if not pending.changed.wait_for(lambda: pending.complete() or self.failure, _left(ends)):
                self._fail(RanksDisagree(f"rank {rank} has waited for {self.timeout:g} s:\n{self._report()}"))
            self._end_if_failed()
        self.turn.take()

    def finish(self, rank: int) -> None:
        """Mark a rank as finished. If another rank waits for its call, the run fails."""
        with self._lock:
            self._finished.add(rank)
            self._ended.notify_all()
            self._look_for_the_impossible()

    def fail(self, error: BaseException, *, rank: int) -> None:
        """Fail the run with this rank's error, unless the run has failed with an earlier error."""
        with self._lock:
            if self.failure is None:
                error.add_note(f"(raised on rank {rank} of {self.size})")
            self._fail(error)

    def abandon(self) -> None:
        """Fail the run without an error: every rank ends at its next collective."""
        with self._lock:
            self._fail(RunEnded())

    def join(self) -> None:
        """Wait until the ranks' threads have ended; after a failure, wait at most `timeout` seconds more."""
        with self._ended:
            self._ended.wait_for(lambda: self.failure or len(self._finished) == self.size)
        ends = None if self.timeout is None else time.monotonic() + self.timeout
        for thread in self.threads:
            thread.join(_left(ends))

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            self._ended.notify_all()
            for pending in self._waiting.values():
                pending.changed.notify_all()

    def _end_if_failed(self) -> None:
        if self.failure is not None:
            raise RunEnded

    def _look_for_the_impossible(self) -> None:
        """Fail the run when a rank waits for a call that cannot come."""
        for pending in self._waiting.values() if self._finished else ():
            if gone := self._finished.intersection(pending.missing()):
                finished = f"{ranks_text(sorted(gone))} {'have' if len(gone) > 1 else 'has'} finished"
                self._fail(RanksDisagree(f"{finished} while others wait:\n{self._report()}"))
                return
        if self._waiting and len(self._waiting) + len(self._finished) == self.size:
            self._fail(RanksDisagree(f"every rank waits for another, none can go on:\n{self._report()}"))

    def _report(self) -> str:
        """Return a line with the state of each rank, and the Python stacks of the ranks that have not finished."""
        lines = []
        for rank in range(self.size):
            pending = self._waiting.get(rank)
            if rank in self._finished:
                lines.append(f"  rank {rank} has finished")
                continue
            if pending is None:
                lines.append(f"  rank {rank} is running")
            else:
                lines.append(f"  rank {rank} waits for {ranks_text(pending.missing())} in {pending.records[rank]}")
            lines.append(stack_of(self.threads[rank].ident))
        return "\n".join(filter(None, lines))


def _left(ends: float | None) -> float | None:
    return None if ends is None else max(0.0, ends - time.monotonic())

"""Worlds inside one process: ranks as threads (`run_threads`, `ThreadWorld`), or one rank alone (`TraceWorld`).

Ranks that are threads start fast and are easy to debug. They compute one at a time (`TurnTaking`), and exchange copies
of their tensors:

    rank 0   all_reduce(x) ──┐ leaves a copy of x                 wait() ── until all have arrived,
    rank 1        all_reduce(x) ──┤                                       then takes its result from the copies
    rank 2             all_reduce(x) ──┴─ a PendingCollective: the record and the copy of each rank

Sums are computed in group order, and all ranks get the same bits. The state of every rank is known. So three errors are
reported at once, without a timeout: calls that differ, a wait for a finished rank, and a deadlock.

`ThreadWorld` is stricter than other worlds where c10d leaves the behaviour undefined (docs/architecture.md, "Worlds").
All tensors are on the CPU. Grad mode, autocast and default device belong to a thread: each rank starts with
torch's defaults, and its changes do not affect other ranks. Default dtype and number of threads are global; they are
left unchanged. Within a rank, one thread at a time may call collectives.

In a `TraceWorld` one rank of a job of any size runs alone: its collectives are recorded and move no data. To compute
the communication cost of a plan, run a step of one rank in this world, and read its records (`World.record`). Kinds,
axes, bytes and order are as in the real job. Meta tensors take no memory and no time; tensors of other ranks count as
zeros."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import (
    CallRecord,
    FlightRecorder,
    RanksDisagree,
    disagreement,
    ranks_text,
    stack_of,
)
from meshwise.comm.api.split_and_reduce import reduce_in_order

# ruff: noqa: ARG002 — most methods here do not need all their arguments
from meshwise.comm.api.world import Axes, Group, Work, World, keep_inference_mode

_PATIENCE_SECONDS = 1.0

Result = TypeVar("Result")


class TurnTaking:
    """Lock that lets one of several threads compute at a time. A thread takes part inside a `with` block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._members: set[int] = set()

    def __enter__(self) -> None:
        self._members.add(threading.get_ident())
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give()
        self._members.discard(threading.get_ident())

    def take(self) -> None:
        """Wait at most a second for this thread's turn, then continue without it. Do nothing outside a `with` block."""
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
        """Add the call of `rank`. deposit: copies of its tensors by the receiver's index; 0 if all reduce it."""
        self.records[rank] = record
        self._deposits[rank] = deposit

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
        reduce_in_order(parts, into=into, op=op)

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
            new = PendingCollective(ranks, changed=threading.Condition(self._lock))
            pending = self._pending.setdefault((line, ranks, ordinal), new)
            pending.arrive(rank, record=record, deposit=deposit)
            if table := disagreement(pending.records):
                self._fail(RanksDisagree(f"the ranks called different collectives:\n{table}"))
                raise RunEnded
            if not pending.missing():
                del self._pending[line, ranks, ordinal]
                for other in ranks:
                    if self._waiting.get(other) is pending:
                        del self._waiting[other]
                pending.changed.notify_all()
            return pending

    def wait(self, pending: PendingCollective, *, rank: int) -> None:
        """Block until every rank has called the collective. Raises RunEnded when the run has failed."""
        with self._lock:
            self._end_if_failed()
            if not pending.missing():
                return
            self._waiting[rank] = pending
            self._fail_if_deadlocked()
            self.turn.give()
            if not pending.changed.wait_for(lambda: not pending.missing() or self.failure, self.timeout):
                self._fail(RanksDisagree(f"rank {rank} has waited for {self.timeout:g} s:\n{self._report()}"))
            self._end_if_failed()
        self.turn.take()

    def sender(self, rank: int, *, sources: Sequence[int]) -> int | None:
        """Return one of `sources` whose next message to `rank` has been sent; give other ranks a turn if none has.
        Raises RunEnded when the run has failed, or all of `sources` have finished."""
        with self._lock:
            self._end_if_failed()
            for source in sources:
                line = (source, rank)
                pending = self._pending.get((True, line, self._calls.get((rank, True, line), 0)))
                if pending is not None and source in pending.records:
                    return source
            if self._finished.issuperset(sources):
                self._fail(RanksDisagree(f"{ranks_text(sources)} have finished while rank {rank} waits for a message"))
        self.turn.give()
        time.sleep(0)
        self.turn.take()
        return None

    def finish(self, rank: int) -> None:
        """Mark a rank as finished. If another rank waits for its call, the run fails."""
        with self._lock:
            self._finished.add(rank)
            self._ended.notify_all()
            self._fail_if_deadlocked()

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
            thread.join(None if ends is None else max(0.0, ends - time.monotonic()))

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            self._ended.notify_all()
            for pending in self._waiting.values():
                pending.changed.notify_all()

    def _end_if_failed(self) -> None:
        if self.failure is not None:
            raise RunEnded

    def _fail_if_deadlocked(self) -> None:
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
            if rank in self._finished:
                lines.append(f"  rank {rank} has finished")
                continue
            pending, state = self._waiting.get(rank), "is running"
            if pending is not None:
                state = f"waits for {ranks_text(pending.missing())} in {pending.records[rank]}"
            lines += [f"  rank {rank} {state}", stack_of(self.threads[rank].ident)]
        return "\n".join(filter(None, lines))


def run_threads(
    size: int, main: Callable[..., Result], *, args: Sequence[Any] = (), timeout: float | None = 60
) -> list[Result]:
    """Run `main(world, *args)` on `size` ranks, each a thread, over the mesh `rank=size`. Return the results by rank.
    timeout: seconds that a rank may wait in one collective while other ranks compute; None for no limit. When a rank
    raises an exception, the other ranks end at their collectives. The exception is raised here, with its traceback and
    a note that names the rank. Raises RanksDisagree when the calls of the ranks do not fit together. A rank that calls
    no collective cannot be ended: `timeout` seconds after a failure it is left running."""
    rendezvous = Rendezvous(size, timeout=timeout)
    results: dict[int, Result] = {}

    def rank_main(rank: int) -> None:
        try:
            with rendezvous.turn:
                results[rank] = main(ThreadWorld(rendezvous, rank=rank, mesh=Mesh.of(rank=size)), *args)
            rendezvous.finish(rank)
        except RunEnded:
            pass
        except BaseException as error:  # noqa: BLE001 — whatever ends one rank ends the run, and is raised below
            rendezvous.fail(error, rank=rank)

    rendezvous.threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    try:
        for thread in rendezvous.threads:
            thread.start()
        rendezvous.join()
    except BaseException:  # Ctrl-C
        rendezvous.abandon()
        raise
    if rendezvous.failure is not None:
        raise rendezvous.failure
    return [results[rank] for rank in range(size)]


def _guarded(record: CallRecord, *, inputs: Mapping[Tensor, Tensor], outputs: Sequence[Tensor]) -> Callable[[], None]:
    """Fill the outputs of a call with 0xFF bytes (bool outputs: with True). Return a function that raises RuntimeError
    if the caller has written to a tensor of the call since. inputs: copy of each input; not used for an output."""
    filled = [(x.view(torch.uint8), 1 if x.dtype == torch.bool else 0xFF) for x in outputs if x.numel()]
    for x, filling in filled:
        x.fill_(filling)
    addresses = {x.data_ptr() for x, _ in filled}
    copies = [(x, copy) for x, copy in inputs.items() if x.data_ptr() not in addresses]

    def check() -> None:
        intact = all(bool(x.min() == filling) for x, filling in filled)
        kept = (torch.equal(x, y) or torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in copies)
        if not (intact and all(kept)):
            raise RuntimeError(f"a tensor was written to before wait(); until then it belongs to {record}")

    return check


class ThreadWorld(World):
    """World of one rank that runs as a thread; `run_threads` makes it."""

    medium = "threads"

    def __init__(self, rendezvous: Rendezvous, *, rank: int, mesh: Mesh) -> None:
        super().__init__(rank=rank, mesh=mesh, device=torch.device("cpu"))
        self.rendezvous, self.turn = rendezvous, rendezvous.turn

    def _move(self, record: CallRecord, group: Group, give: Mapping[int, Tensor], take: Mapping[int, Tensor]) -> Work:
        given = {x.data_ptr() for x in give.values()}

        def collect(met: PendingCollective) -> None:
            for index, target in take.items():
                met.place(target, index=index, part=group.index)

        fill = [x for x in take.values() if x.data_ptr() not in given]
        return self._meet(record, group, give=give, fill=fill, take=collect)

    def _reduce(self, record: CallRecord, group: Group, x: Tensor, how: tuple[int, str]) -> Work:
        if group.index == how[0]:
            return self._all_reduce(record, group, x, how[1])
        return self._meet(record, group, give={0: x}, fill=[x])

    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work:
        return self._meet(record, group, give={0: x}, fill=[x], take=lambda met: x.copy_(met.reduced(op)))

    def _reduce_scatter(self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        into, op = how
        take = partial(PendingCollective.reduce, op=op, into=into, part=group.index)
        return self._meet(record, group, give=dict(enumerate(parts)), fill=[into], take=take)

    def _barrier(self, record: CallRecord, group: Group) -> None:
        self._meet(record, group).wait()

    def _sender(self, record: CallRecord, group: Group, sources: Sequence[int]) -> int | None:
        found = self.rendezvous.sender(self.rank, sources=[group.ranks[source] for source in sources])
        return None if found is None else group.ranks.index(found)

    def _meet(
        self,
        record: CallRecord,
        group: Group,
        *,
        take: Callable[[PendingCollective], object] = lambda _: None,
        give: Mapping[int, Tensor] = MappingProxyType({}),
        fill: Sequence[Tensor] = (),
    ) -> Work:
        """Join the collective with copies of `give`, and return its work. fill: output tensors, which are filled with
        0xFF bytes now. take: called by `wait` when all ranks have called, to copy the results into `fill`."""
        copies = {x: x.clone() for x in dict.fromkeys(give.values())}  # one tensor may be for several ranks
        check = _guarded(record, inputs=copies, outputs=fill)
        deposit = {part: copies[x] for part, x in give.items()}
        pending = self.rendezvous.meet(self.rank, ranks=group.ranks, record=record, deposit=deposit)

        def finish() -> None:
            check()
            self.rendezvous.wait(pending, rank=self.rank)
            take(pending)

        return Work(self, record=record, finish=keep_inference_mode(finish))


class TraceWorld(World):
    """World of one rank of `mesh`, with its tensors on `device`. Raises ValueError when the mesh has no such rank."""

    def __init__(
        self,
        *,
        rank: int,
        mesh: Mesh,
        device: torch.device | str = "meta",
        flight_recorder: FlightRecorder | None = None,
    ) -> None:
        if not 0 <= rank < mesh.size:
            raise ValueError(f"no rank {rank} in the mesh {mesh}; its ranks are 0 to {mesh.size - 1}")
        super().__init__(rank=rank, mesh=mesh, device=torch.device(device), flight_recorder=flight_recorder)

    def exchange(self, value: Any, *, axes: Axes | None = None) -> list[Any]:
        """Return a list with this rank's `value` for every rank of the group. No collective is recorded."""
        return [value] * self.group(self.mesh.names if axes is None else axes).size

    def totals(
        self, x: Tensor, *, digest: int = 0, digest_axes: Axes | None = None, axes: Axes | None = None, common: int = 0
    ) -> tuple[list[float], float]:
        """Return sums as `World.totals` does; for a meta tensor, 1 for each sum and 0 for the mismatch."""
        if not x.is_meta:
            return super().totals(x, axes=axes)
        self.all_reduce(x.new_empty(x.numel() + 1), axes=self.mesh.names if axes is None else axes).wait()
        return [1.0] * x.numel(), 0.0

    def waited(self, record: CallRecord) -> None:
        """Do nothing; subclasses that record waits override it. Called at the first `wait` of each collective."""

    def _move(self, record: CallRecord, group: Group, give: Mapping[int, Tensor], take: Mapping[int, Tensor]) -> Work:
        for index, x in take.items():
            if x.is_meta and len(take) > 1:  # a rehearsal counts one operation for a message, none for several parts
                break
            if index == group.index:
                x.copy_(give[index])
            else:
                x.zero_()
        return Work(self, record=record, finish=partial(self.waited, record))

    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work:
        _with_zeros(x, op)
        return Work(self, record=record, finish=partial(self.waited, record))

    def _reduce_scatter(self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        into, op = how
        into.copy_(parts[group.index])
        _with_zeros(into, op)
        return Work(self, record=record, finish=partial(self.waited, record))

    def _barrier(self, record: CallRecord, group: Group) -> None:
        return

    def _sender(self, record: CallRecord, group: Group, sources: Sequence[int]) -> int | None:
        return sources[0]


def _with_zeros(x: Tensor, op: str) -> None:
    """Reduce `x` in place with zeros for the other ranks; do nothing for meta tensors."""
    if not x.is_meta and op != "sum":
        x.copy_((torch.maximum if op == "max" else torch.minimum)(x, torch.zeros_like(x)))

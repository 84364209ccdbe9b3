"""The World over gloo's messages, for CPU ranks on several hosts and for ranks that share a GPU.

A collective here is a generator. Each `yield` returns started messages; the generator resumes when they are complete.

    | reduce-scatter   send part j to rank j, receive N-1 parts           yield    sum the parts in group order
    | all-gather       send x to all ranks, receive N-1 parts             yield
    | all-reduce       a reduce-scatter of slices                         yield    an all-gather of the sums    yield

The first messages are started before the call returns. A collective of one phase is completed by `wait`. A collective
of two phases is completed by a thread, so that the second phase starts before a call of `wait`. There is one thread
for each group, which runs its calls in order.

The tag of a message is a hash of the call: ranks (not of a send), kind, operation, phase, size, dtype. So a rank never
receives a message of a different collective: it waits, and the hang report names the ranks that differ.

docs/architecture.md says why `GlooTransport` uses gloo's sends and receives alone, and which threads copy CUDA tensors
to pinned memory and back ("Worlds")."""

import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.launcher_info import rank_lost_error
from meshwise.comm.api.split_and_reduce import put, reduce_in_order
from meshwise.comm.api.streams import Streams
from meshwise.comm.api.world import Group, Work, World, keep_inference_mode, message_group
from meshwise.comm.network.job_store import LOOPBACK, address_towards

_FOREVER = timedelta(days=30)


@dataclass(frozen=True)
class PendingMessages:
    """Sends and receives that were started together; `about` is the call, for the message of an error.

    pending: for each message the other rank, the tensor, which is kept alive, and its work."""

    pending: Sequence[tuple[int, Tensor, c10d.Work]]
    about: object

    def wait(self) -> None:
        """Block until all messages are complete. Raises RankLostError when the other rank of a message was lost."""
        for peer, _, work in self.pending:
            try:
                work.wait()
            except RuntimeError as error:
                raise rank_lost_error(peer, about=self.about, error=error) from error


def _tag(label: str, tensor: Tensor) -> int:
    """Return the tag of a message: a hash of its label, size and dtype."""
    return zlib.crc32(f"{label} {tensor.numel()} {tensor.dtype}".encode()) & 0x7FFFFFFF


def _gloo(store: c10d.Store, rank: int, size: int, *, towards: str | None, limit: timedelta) -> c10d.ProcessGroup:
    """Return a gloo process group that is separate from torch's default group, which stays free for the user."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        backend = c10d.ProcessGroupGloo(store, rank, size, limit)
    else:
        # gloo's default is the address of the host's own name, which may be wrong or missing.
        together = towards is None and os.environ.get("LOCAL_WORLD_SIZE") == str(size)
        address = LOOPBACK if together else address_towards(towards or os.environ["MASTER_ADDR"])
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stubs
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
        options._threads = 1
        options._timeout = limit
        backend = c10d.ProcessGroupGloo(store, rank, size, options)
    group = c10d.ProcessGroup(store, rank, size)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backend)
    return group


Steps: TypeAlias = Iterator[PendingMessages]
"""Phases of a collective that was started. Wait for the messages of one phase before you ask for the next phase."""

Program: TypeAlias = Callable[[list[Tensor], list[Tensor]], Steps]
"""Function (input tensors, output tensors) that starts a collective on CPU tensors."""

# All-reduces of at most this many bytes use one phase: sending all data to all ranks costs less than a second phase.
_ONE_PHASE_BYTES = 256 << 10


class WorkerThread:
    """Thread that runs jobs one after the other; it starts when the object is made.

    `close` joins the thread before the interpreter exits. If a daemon thread is inside torch at that moment, the
    process ends with "terminate called without an active exception" and a wrong exit status."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run `job` after all earlier jobs; `result` of the returned future waits for it, and raises its exception."""
        ticket: Future[None] = Future()
        self._jobs.put((ticket, job))
        return ticket

    def close(self) -> None:
        """Block until all jobs are done and the thread has ended."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            ticket, job = entry
            try:
                job()
                ticket.set_result(None)
            except BaseException as error:  # noqa: BLE001 - `wait` raises it in another thread
                ticket.set_exception(error)


class GlooTransport:
    """Connections, threads and unfinished collectives of one rank, shared by all views of its world. Every rank of the
    job makes one, over the same store. `towards`: host on whose interface the ranks connect; None for MASTER_ADDR.
    `limit`: longest wait for a connection or a message."""

    def __init__(
        self, store: c10d.Store, *, rank: int, size: int, towards: str | None = None, limit: timedelta = _FOREVER
    ) -> None:
        self.group: c10d.ProcessGroup | None = _gloo(store, rank, size, towards=towards, limit=limit)
        self.unfinished: set[Work] = set()
        self._workers: dict[str, WorkerThread] = {}

    def worker(self, queue: str) -> WorkerThread:
        """Return the thread that runs the collectives with the queue name `queue` in their order."""
        if queue not in self._workers:
            self._workers[queue] = WorkerThread(f"meshwise {queue}")
        return self._workers[queue]

    def close(self) -> None:
        """Finish all collectives, end the threads and close the connections."""
        for work in list(self.unfinished):
            work.wait()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self.group = None


@dataclass(frozen=True)
class _Call:
    """One collective of a group, with the transport of its messages."""

    record: CallRecord
    group: Group
    transport: GlooTransport

    @property
    def label(self) -> str:
        """Text in the tag of the call's messages: purpose and ranks of the group, and `CallRecord.signature`. For send
        and recv without the ranks, so that `recv_any` can receive from any rank."""
        ranks = "" if self.record.point_to_point else f"{self.group.ranks} "
        return f"{self.group.purpose} {ranks}{self.record.signature}"

    @property
    def peers(self) -> list[tuple[int, int]]:
        """(group index, rank) of the other ranks, from the next index around, so ranks begin with different peers."""
        own, ranks = self.group.index, self.group.ranks
        return [(index, ranks[index]) for index in (*range(own + 1, len(ranks)), *range(own))]

    def post(
        self, *, sends: Iterable[tuple[int, Tensor]] = (), receives: Iterable[tuple[int, Tensor]] = (), phase: str = ""
    ) -> PendingMessages:
        """Start messages. `sends`, `receives`: for each message the other rank and a contiguous CPU tensor. Messages
        of one rank with equal label, phase, size and dtype arrive in the order of sending. Empty tensors are skipped.
        phase: text that only messages of the same phase have. Raises RankLostError."""
        assert self.transport.group is not None, "the world was closed"
        label, pending = f"{self.label}{phase}", []
        for start, messages in ((self.transport.group.recv, receives), (self.transport.group.send, sends)):
            for peer, tensor in messages:
                if tensor.numel():
                    try:
                        pending.append((peer, tensor, start([tensor], peer, _tag(label, tensor))))
                    except RuntimeError as error:
                        raise rank_lost_error(peer, about=self.record, error=error) from error
        return PendingMessages(pending, self.record)


class GlooWorld(World):
    """World over a `GlooTransport`. A world of one rank has no transport (None)."""

    medium = "gloo"

    def __init__(self, *, rank: int, mesh: Mesh, device: torch.device, transport: GlooTransport | None) -> None:
        super().__init__(rank=rank, mesh=mesh, device=device)
        self._transport = transport

    def close(self) -> None:
        """Wait until all ranks have called this method, finish all collectives, and close the connections."""
        if self._transport is not None and self._transport.group is not None:
            self._meet_to_close()
            self._transport.close()

    def _call(self, record: CallRecord, group: Group) -> _Call:
        assert self._transport is not None, "a world of one rank"
        return _Call(record, group, self._transport)

    # ---- one phase ---------------------------------------------------------------------------------------------

    def _move(self, record: CallRecord, group: Group, give: Mapping[int, Tensor], take: Mapping[int, Tensor]) -> Work:
        call = self._call(record, group)
        given = list(dict.fromkeys(give.values()))  # one tensor may go to several ranks

        def program(reads: list[Tensor], writes: list[Tensor]) -> Steps:
            read_of, write_of = dict(zip(given, reads, strict=True)), dict(zip(take, writes, strict=True))
            messages = call.post(
                sends=[(rank, read_of[give[index]]) for index, rank in call.peers if index in give],
                receives=[(rank, write_of[index]) for index, rank in reversed(call.peers) if index in take],
            )
            if group.index in take:
                put(read_of[give[group.index]], into=write_of[group.index])
            yield messages

        return self._start(call, program, reads=given, writes=list(take.values()))

    def _reduce_scatter(self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        into, op = how
        call = self._call(record, group)
        return self._start(
            call, lambda reads, writes: self._reduced(call, reads, writes[0], op), reads=parts, writes=[into]
        )

    def _recv_any(self, record: CallRecord, group: Group, x: Tensor, sources: Sequence[int]) -> int:
        call = self._call(record, message_group(group, source=sources[0], target=group.index))
        assert call.transport.group is not None, "the world was closed"
        try:
            work = call.transport.group.recv_anysource([x], _tag(call.label, x))
            work.wait()
        except RuntimeError as error:
            raise rank_lost_error(group.ranks[sources[0]], about=record, error=error) from error
        source = group.ranks.index(work._source_rank())
        self._new_record("recv", message_group(group, source=source, target=group.index), x, how=f"from {source}")
        return source

    def _barrier(self, record: CallRecord, group: Group) -> None:
        parts = list(torch.zeros(group.size, dtype=torch.uint8).split(1))
        self._all_gather(record, group, parts[group.index], parts)._finish()

    # ---- two phases --------------------------------------------------------------------------------------------

    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work:
        """Start a reduction in which each rank reduces its slice of `x` and sends it to the others. If `x` is small,
        each rank reduces all of `x`, in one phase."""
        call, small = self._call(record, group), record.bytes <= _ONE_PHASE_BYTES

        def program(reads: list[Tensor], writes: list[Tensor]) -> Steps:
            if small:
                yield from self._reduced(call, reads * group.size, writes[0], op)
                return
            slices = writes[0].tensor_split(group.size)
            own = slices[group.index]
            yield from self._reduced(call, list(reads[0].tensor_split(group.size)), own, op)
            yield call.post(
                sends=[(rank, own) for _, rank in call.peers],
                receives=[(rank, slices[index]) for index, rank in reversed(call.peers)],
                phase=" sums",
            )

        return self._start(call, program, reads=[x], writes=[x], carried=not small)

    def _reduced(self, call: _Call, parts: list[Tensor], into: Tensor, op: str) -> Steps:
        """Send every rank its part, and reduce the received parts and this rank's own part into `into`."""
        own = call.group.index
        outgoing = [(rank, parts[index]) for index, rank in call.peers]
        received = {index: torch.empty_like(parts[own]) for index, _ in call.peers}
        yield call.post(sends=outgoing, receives=[(rank, received[at]) for at, rank in reversed(call.peers)])
        ordered = [received.get(index, parts[own]) for index in range(call.group.size)]
        reduce_in_order(ordered, into=into, op=op)

    # ---- how the phases run ------------------------------------------------------------------------------------

    def _start(
        self, call: _Call, program: Program, *, reads: list[Tensor], writes: list[Tensor], carried: bool = False
    ) -> Work:
        """Start `program` on the input tensors `reads` and output tensors `writes`, and return its work. CUDA tensors
        are replaced by pinned copies. carried: True if a thread completes the collective."""
        transport = call.transport
        queue = f"{call.group.purpose} {call.group.ranks}"
        if self.device.type == "cuda":
            rest = _staged(self.streams, program, reads, writes, worker=transport.worker(queue))
        else:
            steps = program(reads, writes)
            rest = keep_inference_mode(partial(_complete, itertools.chain([next(steps)], steps)))
            if carried:
                rest = transport.worker(queue).submit(rest).result

        def finish() -> None:
            transport.unfinished.discard(work)
            rest()

        work = Work(self, record=call.record, finish=finish)
        transport.unfinished.add(work)  # a work that the caller drops is finished at `close`
        return work


def _complete(steps: Steps) -> None:
    for messages in steps:
        messages.wait()


def _staged(
    streams: Streams, program: Program, reads: list[Tensor], writes: list[Tensor], *, worker: WorkerThread
) -> Callable[[], None]:
    """Run `program` in a thread on pinned copies of CUDA tensors. The returned function copies the results back."""
    copies = [streams.host_empty(x.shape, dtype=x.dtype) for x in (*reads, *writes)]
    for copy, x in zip(copies, reads, strict=False):
        copy.copy_(x, non_blocking=True)
    copied = streams.mark(blocking=True)

    def carry() -> None:
        copied.synchronize()
        _complete(program(copies[: len(reads)], copies[len(reads) :]))

    ticket = worker.submit(keep_inference_mode(carry))

    def finish() -> None:
        ticket.result()
        for x, copy in zip(writes, copies[len(reads) :], strict=True):
            x.copy_(copy, non_blocking=True)

    return keep_inference_mode(finish)

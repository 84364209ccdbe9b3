"""The World over NCCL, for ranks with one GPU each.

Every group of ranks has its own communicator, which its members make when they first use it. NCCL runs its operations
on its own streams. A call lets NCCL's stream wait for the current stream; `wait` lets the current stream wait for
NCCL's. Neither blocks the host. Equal parts in one piece of memory use NCCL's all-gather and reduce-scatter. All other
parts are exchanged by NCCL's grouped sends and receives (all-to-all).

For send and recv there is a communicator and a thread for each direction between two ranks. To make a communicator
takes both ranks. In the main thread ranks that all send first would wait for each other in a circle.
"""

import itertools
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flat_parts import reduce_in_order, require_op
from meshwise.comm.api.flight_recorder import CallRecord, FlightRecorder
from meshwise.comm.api.streams import streams_of
from meshwise.comm.api.world import Group, Work, World
from meshwise.comm.network.worker_thread import WorkerThread

Backend: TypeAlias = Callable[[c10d.Store, int, int], c10d.ProcessGroup]
"""Function (store, rank, size) that makes a process group of the ranks that call it over the same store."""

Post: TypeAlias = Callable[[c10d.ProcessGroup], c10d.Work]
"""Function that starts a send or recv in a process group."""

FOREVER = timedelta(days=30)
"""Timeout of process groups: the watchdog ends hanging jobs before, with a report."""

_OPS: Mapping[str, c10d.ReduceOp] = {
    "sum": c10d.ReduceOp(c10d.ReduceOp.SUM),
    "max": c10d.ReduceOp(c10d.ReduceOp.MAX),
    "min": c10d.ReduceOp(c10d.ReduceOp.MIN),
}


def nccl(store: c10d.Store, rank: int, size: int) -> c10d.ProcessGroup:
    """Return an NCCL process group of the `size` ranks that call this function over the same store."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    backend = c10d.ProcessGroupNCCL(store, rank, size, options)
    group = c10d.ProcessGroup(store, rank, size)
    group._set_default_backend(c10d.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), c10d.ProcessGroup.BackendType.NCCL, backend)
    return group


class Communicators:
    """Process groups of one rank, and its threads for messages; both are made when they are first used."""

    def __init__(self, store: c10d.Store, *, backend: Backend) -> None:
        self._store = store
        self._backend = backend
        self._made: dict[tuple[str, tuple[int, ...]], c10d.ProcessGroup] = {}
        self._workers: dict[tuple[int, int], WorkerThread] = {}
        self.closed = False

    def of(self, ranks: tuple[int, ...], *, rank: int, purpose: str = "") -> c10d.ProcessGroup:
        """Return the process group of `ranks` for `purpose`; block until all members have made it. rank: this rank."""
        assert not self.closed, "the world was closed"
        if (purpose, ranks) not in self._made:
            # A separate connection to the store: a connection that waits for a key is locked. Two threads that wait for
            # each other's ranks over one connection would wait forever.
            own = self._store.clone()  # type: ignore[attr-defined]
            store = c10d.PrefixStore(f"{purpose}{'-'.join(map(str, ranks))}", own)
            self._made[purpose, ranks] = self._backend(store, ranks.index(rank), len(ranks))
        return self._made[purpose, ranks]

    def worker(self, ends: tuple[int, int]) -> WorkerThread:
        """Return the thread that starts the messages from rank `ends[0]` to rank `ends[1]`."""
        if ends not in self._workers:
            self._workers[ends] = WorkerThread(f"meshwise messages from {ends[0]} to {ends[1]}")
        return self._workers[ends]

    def close(self) -> None:
        """Finish all messages, end the threads and release the process groups."""
        for worker in self._workers.values():
            worker.close()
        self.closed = True
        for group in self._made.values():
            group.shutdown()
        self._made.clear()


class NcclWorld(World):
    """World over NCCL's process groups, or in tests on the CPU over process groups of another backend."""

    medium = "NCCL"

    def __init__(
        self,
        *,
        rank: int,
        mesh: Mesh,
        device: torch.device,
        communicators: Communicators,
        flight_recorder: FlightRecorder | None = None,
    ) -> None:
        super().__init__(rank=rank, mesh=mesh, device=device, flight_recorder=flight_recorder)
        self._communicators = communicators
        self.streams = streams_of(device)

    def close(self) -> None:
        """Wait until all ranks have called this method, finish all messages, and release the communicators."""
        if not self._communicators.closed:
            self._meet_to_close()
            self._communicators.close()

    def _broadcast(self, record: CallRecord, group: Group, x: Tensor, source: int) -> Work:
        options = c10d.BroadcastOptions()
        options.rootRank = source
        return _Started(self, record, self._together(group).broadcast([x], options).wait, [x])

    def _reduce(self, record: CallRecord, group: Group, x: Tensor, how: tuple[int, str]) -> Work:
        target, op = how
        require_op(op)
        options = c10d.ReduceOptions()
        options.rootRank, options.reduceOp = target, _OPS[op]
        return _Started(self, record, self._together(group).reduce([x], options).wait, [x])

    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work:
        require_op(op)
        options = c10d.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return _Started(self, record, self._together(group).allreduce([x], options).wait, [x])

    def _all_gather(self, record: CallRecord, group: Group, x: Tensor, parts: list[Tensor]) -> Work:
        whole = _joined(parts)
        if whole is None:
            return self._all_to_all(record, group, [x] * group.size, parts)
        return _Started(self, record, self._together(group)._allgather_base(whole, x).wait, [x, whole])

    def _reduce_scatter(self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        into, op = how
        require_op(op)
        whole = _joined(parts)
        if whole is not None:
            options = c10d.ReduceScatterOptions()
            options.reduceOp = _OPS[op]
            work = self._together(group)._reduce_scatter_base(into, whole, options)
            return _Started(self, record, work.wait, [into, whole])
        received = [torch.empty_like(parts[group.index]) for _ in parts]
        work = self._together(group).alltoall(received, parts)

        def finish() -> None:
            work.wait()
            reduce_in_order(received, into=into, scratch=received[0], op=op)

        return _Started(self, record, finish, [*parts, *received, into])

    def _all_to_all(self, record: CallRecord, group: Group, parts: list[Tensor], into: list[Tensor]) -> Work:
        return _Started(self, record, self._together(group).alltoall(into, parts).wait, [*parts, *into])

    def _gather(self, record: CallRecord, group: Group, x: Tensor, how: tuple[list[Tensor] | None, int]) -> Work:
        parts, target = how
        nothing = x.new_empty(0)
        sends = [x if index == target else nothing for index in range(group.size)]
        return self._all_to_all(record, group, sends, parts or [nothing] * group.size)

    def _scatter(self, record: CallRecord, group: Group, how: tuple[list[Tensor] | None, int], into: Tensor) -> Work:
        parts, source = how
        nothing = into.new_empty(0)
        receives = [into if index == source else nothing for index in range(group.size)]
        return self._all_to_all(record, group, parts or [nothing] * group.size, receives)

    def _send(self, record: CallRecord, group: Group, x: Tensor, to: int) -> Work:
        ends = (self.rank, group.ranks[to])
        return self._message(record, ends, x, lambda between: between.send([x], 1, 0))

    def _recv(self, record: CallRecord, group: Group, x: Tensor, source: int) -> Work:
        ends = (group.ranks[source], self.rank)
        return self._message(record, ends, x, lambda between: between.recv([x], 0, 0))

    def _message(self, record: CallRecord, ends: tuple[int, int], x: Tensor, post: Post) -> Work:
        """Start a message from rank ends[0] to ends[1] in its thread, after the work queued on the current stream."""
        behind = self.streams.mark()
        posted: list[c10d.Work] = []

        def job() -> None:
            between = self._communicators.of(ends, rank=self.rank, purpose="from ")
            stream = self.streams.create()
            with self.streams.guard(), self.streams.use(stream):
                stream.wait_event(behind)
                posted.append(post(between))

        ticket = self._communicators.worker(ends).submit(job)

        def finish() -> None:
            ticket.wait()
            posted[0].wait()

        return _Started(self, record, finish, [x])

    def _barrier(self, record: CallRecord, group: Group) -> None:
        token = torch.zeros(1, device=self.device)
        self._all_reduce(record, group, token, "sum")._finish()
        token.item()

    def _together(self, group: Group) -> c10d.ProcessGroup:
        """Return the process group for the collectives of a group."""
        return self._communicators.of(group.ranks, rank=self.rank)


class _Started(Work):
    """An operation on one of NCCL's streams, with the tensors that it reads and writes."""

    def __init__(self, world: NcclWorld, record: CallRecord, finish: Callable[[], Any], tensors: list[Tensor]) -> None:
        super().__init__(world, record=record)
        self._complete = finish
        self._tensors = tensors
        self._streams = world.streams
        self._stream = self._streams.current()

    def _finish(self) -> None:
        self._complete()
        current = self._streams.current()
        if self._stream != current:
            # The memory of the tensors is reused on the stream that made them, which does not wait for the operation.
            for x in self._tensors:
                self._streams.keep(x, stream=current)
        self._tensors = []


def _joined(parts: list[Tensor]) -> Tensor | None:
    """Return the parts as one tensor if they have equal sizes and follow each other in one storage, else None."""
    size = parts[0].numel()
    for part, following in itertools.pairwise(parts):
        if following.numel() != size or following.data_ptr() != part.data_ptr() + size * part.element_size():
            return None
    if parts[-1].untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr():
        return None
    return parts[0].as_strided((size * len(parts),), (1,))

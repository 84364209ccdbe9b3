"""NCCL's collectives as a World: one GPU for each rank.

Every group of ranks has a communicator of its own, made by its members when they first use it. NCCL runs on streams of
its own: starting an operation orders it behind the current stream, waiting orders the current stream behind it, and
neither blocks the host. Parts of equal size that lie one after the other use NCCL's own all-gather and reduce-scatter.
Anything else is one exchange of parts, made of grouped sends and receives.

Messages have a communicator for each direction between two ranks, and a thread that posts them. Making a communicator
takes both ends, so ranks that all send first would wait for each other in a circle.
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
Post: TypeAlias = Callable[[c10d.ProcessGroup], c10d.Work]

FOREVER = timedelta(days=30)
_OPS: Mapping[str, c10d.ReduceOp] = {
    "sum": c10d.ReduceOp(c10d.ReduceOp.SUM),
    "max": c10d.ReduceOp(c10d.ReduceOp.MAX),
    "min": c10d.ReduceOp(c10d.ReduceOp.MIN),
}


def nccl(store: c10d.Store, rank: int, size: int) -> c10d.ProcessGroup:
    """Return a communicator among the ranks that meet under this store."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    backend = c10d.ProcessGroupNCCL(store, rank, size, options)
    group = c10d.ProcessGroup(store, rank, size)
    group._set_default_backend(c10d.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), c10d.ProcessGroup.BackendType.NCCL, backend)
    return group


class Communicators:
    """The process groups of one rank, made when first used. Only their members take part in making one."""

    def __init__(self, store: c10d.Store, *, backend: Backend) -> None:
        self._store = store
        self._backend = backend
        self._made: dict[tuple[str, tuple[int, ...]], c10d.ProcessGroup] = {}
        self._workers: dict[tuple[int, int], WorkerThread] = {}
        self.closed = False

    def of(self, ranks: tuple[int, ...], *, rank: int, purpose: str = "") -> c10d.ProcessGroup:
        """Return the process group of `ranks`, among which `rank` is this one."""
        assert not self.closed, "the world was closed"
        if (purpose, ranks) not in self._made:
            # A connection of its own: one that waits for a key is locked, and two workers that wait for each other's
            # ranks through the same connection would wait forever.
            own = self._store.clone()  # type: ignore[attr-defined]
            store = c10d.PrefixStore(f"{purpose}{'-'.join(map(str, ranks))}", own)
            self._made[purpose, ranks] = self._backend(store, ranks.index(rank), len(ranks))
        return self._made[purpose, ranks]

    def worker(self, ends: tuple[int, int]) -> WorkerThread:
        """Return the thread that posts the messages from one rank to another."""
        if ends not in self._workers:
            self._workers[ends] = WorkerThread(f"meshwise messages from {ends[0]} to {ends[1]}")
        return self._workers[ends]

    def close(self) -> None:
        """Finish and release all of them."""
        for worker in self._workers.values():
            worker.close()
        self.closed = True
        for group in self._made.values():
            group.shutdown()
        self._made.clear()


class NcclWorld(World):
    """Ranks joined by c10d process groups: NCCL's, or for its tests on CPU any backend with the same collectives."""

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
        """Wait until all ranks call it and nothing is under way, then release the communicators."""
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
        """Let the thread of this direction post a message behind what the current stream does now."""
        behind = self.streams.mark()
        posted: list[c10d.Work] = []

        def job() -> None:
            between = self._communicators.of(ends, rank=self.rank, purpose="from ")
            stream = self.streams.create()
            with self.streams.guard(), self.streams.use(stream):
                stream.wait_event(behind)
                posted.append(post(between))

        ticket = self._communicators.worker(ends).carry(job)

        def finish() -> None:
            ticket.wait()
            posted[0].wait()

        return _Started(self, record, finish, [x])

    def _barrier(self, record: CallRecord, group: Group) -> None:
        token = torch.zeros(1, device=self.device)
        self._all_reduce(record, group, token, "sum")._finish()
        token.item()

    def _together(self, group: Group) -> c10d.ProcessGroup:
        """Return the process group of a collective."""
        return self._communicators.of(group.ranks, rank=self.rank)


class _Started(Work):
    """An operation on a stream of NCCL's, with the tensors it reads and writes."""

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
            # Their memory belongs to the stream they were made on, which has not been ordered behind the operation.
            for x in self._tensors:
                self._streams.keep(x, stream=current)
        self._tensors = []


def _joined(parts: list[Tensor]) -> Tensor | None:
    """Return the parts as one tensor, when they have one size and lie one after the other in memory."""
    size = parts[0].numel()
    for part, following in itertools.pairwise(parts):
        if following.numel() != size or following.data_ptr() != part.data_ptr() + size * part.element_size():
            return None
    if parts[-1].untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr():
        return None
    return parts[0].as_strided((size * len(parts),), (1,))

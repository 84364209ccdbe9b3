"""The World over NCCL, for ranks with one GPU each.

Every group of ranks has its own communicator. NCCL runs its operations on its own streams. A call lets NCCL's stream
wait for the current stream; `wait` lets the current stream wait for NCCL's. Neither blocks the host. Equal parts in one
piece of memory use NCCL's all-gather and reduce-scatter. Other parts use grouped sends and receives (all-to-all).

For send and recv each direction between two ranks has a communicator, and so one stream: a send never queues behind a
receive. These streams are of high priority, because a stage that waits computes nothing. NCCL knows no tags: messages
of one direction arrive in the order of sending.

All ranks of a communicator create it together, and block. `prepare` creates all communicators in one order on every
rank. An unprepared communicator is created at its first call: two ranks that both send to each other first deadlock."""

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.split_and_reduce import reduce_block, require_op
from meshwise.comm.api.streams import StreamEvent
from meshwise.comm.api.world import Group, Work, World

Backend: TypeAlias = Callable[[str, tuple[int, ...], int], c10d.ProcessGroup]
"""Function (purpose, ranks, rank) that makes the process group of `ranks`; all of them call it."""

POINT_TO_POINT = "p2p "
"""`purpose` of the communicators of send and recv, whose ranks are (source, target)."""

_OPS: Mapping[str, c10d.ReduceOp] = {
    "sum": c10d.ReduceOp(c10d.ReduceOp.SUM),
    "max": c10d.ReduceOp(c10d.ReduceOp.MAX),
    "min": c10d.ReduceOp(c10d.ReduceOp.MIN),
}


def nccl(store: c10d.Store) -> Backend:
    """Return the function that makes NCCL process groups; their ranks meet over `store`, the store of the job."""
    kind = _preferred_class()

    def make(purpose: str, ranks: tuple[int, ...], rank: int) -> c10d.ProcessGroup:
        options = kind.Options()
        options._timeout = timedelta(days=30)  # the watchdog ends hung jobs earlier and reports
        if "is_high_priority_stream" in dir(options):
            options.is_high_priority_stream = purpose == POINT_TO_POINT
        own = c10d.PrefixStore(f"{purpose}{'-'.join(map(str, ranks))}", store)
        index, size = ranks.index(rank), len(ranks)
        backend = kind(own, index, size, options)
        group = c10d.ProcessGroup(own, index, size)
        group._set_default_backend(c10d.ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), c10d.ProcessGroup.BackendType.NCCL, backend)
        return group

    return make


def _preferred_class() -> Any:
    """Return the class of NCCL groups that torch prefers: NCCL2 from torch 2.15, or by TORCH_DIST_USE_NCCL2."""
    new = vars(c10d).get("ProcessGroupNCCL2")
    default = "1" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15) else "0"
    is_new = os.environ.get("TORCH_DIST_USE_NCCL2", default) == "1"
    return new if new is not None and is_new else c10d.ProcessGroupNCCL


class Communicators:
    """Process groups of one rank, made when they are first used or prepared. `made`: by purpose and ranks."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.made: dict[tuple[str, tuple[int, ...]], c10d.ProcessGroup] = {}
        self.closed = False

    def of(self, ranks: tuple[int, ...], *, rank: int, purpose: str = "") -> c10d.ProcessGroup:
        """Return the process group of `ranks` for `purpose`; block until all members have made it. rank: this rank."""
        assert not self.closed, "the world was closed"
        if (purpose, ranks) not in self.made:
            self.made[purpose, ranks] = self._backend(purpose, ranks, rank)
        return self.made[purpose, ranks]

    def close(self) -> None:
        """Release the process groups, in the same order on every rank: a release may wait for the other members."""
        self.closed = True
        for key in sorted(self.made):
            self.made.pop(key).shutdown()


class NcclWorld(World):
    """World over NCCL's process groups, or in tests on the CPU over process groups of another backend."""

    medium = "NCCL"

    def __init__(self, *, rank: int, mesh: Mesh, device: torch.device, communicators: Communicators) -> None:
        super().__init__(rank=rank, mesh=mesh, device=device)
        self._communicators = communicators
        self._passed: deque[tuple[CallRecord, StreamEvent]] = deque(maxlen=64)

    @property
    def oldest_running_call(self) -> CallRecord | None:
        """Oldest of the last 64 awaited calls that the GPU has not finished; None if it has finished all."""
        return next((record for record, passed in self._passed.copy() if not passed.query()), None)

    def prepare(self, *, groups: Iterable[Group] = (), lines: Iterable[tuple[int, int]] = ()) -> None:
        """Create the communicators of `groups` and `lines` (source, target); send one number over each line."""
        keys: set[tuple[str, tuple[int, ...]]] = {("", group.ranks) for group in groups if group.size > 1}
        keys |= {(POINT_TO_POINT, ranks) for ranks in lines if self.rank in ranks}
        # Every rank goes through its communicators in the same order, so no ranks deadlock.
        new = sorted(key for key in keys if key not in self._communicators.made)
        for purpose, ranks in new:
            made = self._communicators.of(ranks, rank=self.rank, purpose=purpose)
            if purpose == POINT_TO_POINT:
                # NCCL connects two ranks at their first message, which blocks the host.
                number = [torch.zeros(1, device=self.device)]
                (made.send(number, 1, 0) if ranks[0] == self.rank else made.recv(number, 0, 0)).wait()
        if new:
            self.streams.synchronize()

    def close(self) -> None:
        """Wait until all ranks have called this method, finish all messages, and release the communicators."""
        if not self._communicators.closed:
            self._meet_to_close()
            self._communicators.close()

    def _broadcast(self, record: CallRecord, group: Group, x: Tensor, source: int) -> Work:
        options = c10d.BroadcastOptions()
        options.rootRank = source
        x = _real(x)
        return self._started(record, self._together(group).broadcast([x], options).wait, [x])

    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work:
        require_op(op, dtype=x.dtype if x.is_complex() else None)
        options = c10d.AllreduceOptions()
        options.reduceOp = _OPS[op]
        x = _real(x)
        return self._started(record, self._together(group).allreduce([x], options).wait, [x])

    def _all_gather(self, record: CallRecord, group: Group, x: Tensor, parts: list[Tensor]) -> Work:
        x, parts = _real(x), [_real(part) for part in parts]
        whole = _joined(parts)
        if whole is None:
            return super()._all_gather(record, group, x, parts)
        return self._started(record, self._together(group)._allgather_base(whole, x).wait, [x, whole])

    def _reduce_scatter(self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        into, op = _real(how[0]), how[1]
        require_op(op, dtype=how[0].dtype if how[0].is_complex() else None)
        parts = [_real(part) for part in parts]
        whole = _joined(parts)
        if whole is not None:
            options = c10d.ReduceScatterOptions()
            options.reduceOp = _OPS[op]
            work = self._together(group)._reduce_scatter_base(into, whole, options)
            return self._started(record, work.wait, [into, whole])
        received = [torch.empty_like(parts[group.index]) for _ in parts]
        work = self._together(group).alltoall(received, parts)

        def finish() -> None:
            work.wait()
            reduce_block(received, into=into, scratch=received[0], op=op)

        return self._started(record, finish, [*parts, *received, into])

    def _move(self, record: CallRecord, group: Group, give: Mapping[int, Tensor], take: Mapping[int, Tensor]) -> Work:
        give, take = ({index: _real(x) for index, x in each.items()} for each in (give, take))
        moved = [*give.values(), *take.values()]
        if record.point_to_point:
            line = self._communicators.of(group.ranks, rank=self.rank, purpose=POINT_TO_POINT)
            return self._started(record, (line.send(moved, 1, 0) if give else line.recv(moved, 0, 0)).wait, moved)
        nothing = moved[0].new_empty(0)
        sends, receives = ([own.get(index, nothing) for index in range(group.size)] for own in (give, take))
        return self._started(record, self._together(group).alltoall(receives, sends).wait, moved)

    def _barrier(self, record: CallRecord, group: Group) -> None:
        token = torch.zeros(1, device=self.device)
        self._all_reduce(record, group, token, "sum")._finish()
        token.item()

    def _together(self, group: Group) -> c10d.ProcessGroup:
        """Return the process group for the collectives of a group."""
        return self._communicators.of(group.ranks, rank=self.rank)

    def _started(self, record: CallRecord, complete: Callable[[], Any], tensors: list[Tensor]) -> Work:
        """Return the work of an operation on one of NCCL's streams, which reads and writes `tensors`."""
        began_on = self.streams.current()

        def finish() -> None:
            complete()
            self._passed.append((record, self.streams.mark()))
            if (current := self.streams.current()) != began_on:
                # torch may reuse their memory on the stream that made them, which does not wait for the operation.
                for x in tensors:
                    self.streams.keep(x, stream=current)

        return Work(self, record=record, finish=finish)


def _real(x: Tensor) -> Tensor:
    """Return the real and imaginary parts of a complex tensor, in its memory: NCCL knows no complex numbers."""
    return torch.view_as_real(x).view(-1) if x.is_complex() else x


def _joined(parts: list[Tensor]) -> Tensor | None:
    """Return the parts as one tensor if they have equal sizes and follow each other in one storage, else None."""
    size = parts[0].numel()
    for part, following in itertools.pairwise(parts):
        if following.numel() != size or following.data_ptr() != part.data_ptr() + size * part.element_size():
            return None
    if parts[-1].untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr():
        return None
    return parts[0].as_strided((size * len(parts),), (1,))

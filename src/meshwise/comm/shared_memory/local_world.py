"""The World of CPU ranks on one host, with collectives in shared memory.

Every rank posts the locations of its tensors (see `group_queue`), and reads the parts that it needs from other ranks:

    | all-gather, broadcast, all-to-all, …   every rank copies the other ranks' parts into its own tensors
    | reduce-scatter                         every rank adds up its part, straight from the other ranks' tensors
    | all-reduce                             every rank adds up its slice, block by block, and writes each block of the
    |                                        sum into all ranks' tensors, without intermediate copies
    | tensors of up to 64 KB in total        the board has a copy of the contents: the rank need not wait for readers

    | tensors                access by other ranks
    | from `World.empty`     shared memory, mapped once, read and written in place
    | all other tensors      copied between the processes by process_vm_readv and process_vm_writev; where the system
    |                        forbids this, a copy in shared memory that is lent for the call

Ranks are added up in group order. So sums have the same bits wherever the tensors are, and on whichever rank."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.collective_buffers import put
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.job_processes import lost
from meshwise.comm.api.world import Axes, Group, Work, World, keep_inference_mode, message_group
from meshwise.comm.shared_memory.group_queue import GroupQueues, QueuedCall, travels_in_payload
from meshwise.comm.shared_memory.host_connection import PAYLOAD_BYTES
from meshwise.comm.shared_memory.shared_segment import Span, reduce_spans

# Copies in lent memory begin at multiples of this number of bytes: a cache line, which any dtype's size divides.
_ALIGNED = 64


class LocalWorld(World):
    """World of the CPU ranks of one host. A rank works on collectives when it waits, calls one or makes progress."""

    medium = "shared memory"

    def __init__(self, *, rank: int, mesh: Mesh, queues: GroupQueues) -> None:
        super().__init__(rank=rank, mesh=mesh, device=torch.device("cpu"))
        self._queues = queues

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized 1-D tensor in shared memory, or in ordinary memory if it has at most 64 KB."""
        if numel * dtype.itemsize <= PAYLOAD_BYTES:
            return super().empty(numel, dtype=dtype)
        return self._queues.host.slabs.empty(numel, dtype=dtype)

    def shared_empty(self, numel: int, *, dtype: torch.dtype, axes: Axes) -> Tensor | None:
        """Return an uninitialized 1-D tensor in memory that all ranks along `axes` share; None for a group of one rank.
        Every rank of the group calls this method. The memory is freed when no rank uses the tensor any more. Raises
        OSError when the system refuses shared memory, RankLostError when a rank has ended."""
        group, host = self.group(axes), self._queues.host
        if group.size == 1:
            return None
        size = max(1, numel * dtype.itemsize)
        segment = host.slabs.make(size) if group.index == 0 else None
        place = torch.tensor([segment.place if segment else 0])
        self.broadcast(place, axes=axes).wait()
        try:
            memory = segment.memory if segment else host.peers[group.ranks[0]].slabs.map(int(place))
        except OSError as error:
            if (gone := host.lost_by(group.ranks, error=error)) is not None:
                raise lost(gone, about="World.shared_empty", error=error) from error
            raise
        self.barrier(axes=axes)
        if segment:
            segment.close()
        joint = host.joint_tensors.add(memory, ranks=group.ranks)
        return joint[: numel * dtype.itemsize].view(dtype)

    def progress(self) -> None:
        """Do this rank's part of collectives that the other ranks have posted by now."""
        self._queues.progress()

    def close(self) -> None:
        """Wait until all ranks have called this method, finish all collectives, and close the connection."""
        if not self._queues.closed:
            self._meet_to_close()
            self._queues.close()

    # ---- every rank reads what it needs --------------------------------------------------------------------------

    def _move(self, record: CallRecord, group: Group, give: Mapping[int, Tensor], take: Mapping[int, Tensor]) -> Work:
        call, me, own = self._call(record, group), group.index, give.get(group.index)
        has_parts = record.kind in ("all_to_all", "scatter")  # then a rank gives each other rank another tensor
        users = [index for index in call.others if index in give]
        needs = [index for index in call.others if index in take]

        def act() -> None:
            if own is not None and me in take:
                put(own, into=take[me])
            for index in needs:
                call.queue.take(call, index=index, into=take[index], which=me if has_parts else 0)

        gives = list(give.values()) if users else []
        return self._begin(call, gives=gives if has_parts else gives[:1], needs=needs, users=users, act=act)

    def _all_gather(self, record: CallRecord, group: Group, x: Tensor, parts: list[Tensor]) -> Work:
        joint = self._queues.host.joint_tensors.name(parts, ranks=group.ranks)
        if not joint:
            return super()._all_gather(record, group, x, parts)
        call = self._call(record, group)
        call.joint = joint
        put(x, into=parts[group.index])
        return self._begin(call, needs=call.others, act=lambda: call.queue.require_joint(call))

    def _barrier(self, record: CallRecord, group: Group) -> None:
        call = self._call(record, group)
        self._begin(call, needs=call.others)._finish()

    def _sender(self, record: CallRecord, group: Group, sources: Sequence[int]) -> int | None:
        for source in sources:
            if self._queues.of(message_group(group, source=source, target=group.index)).is_ahead(0):
                return source
        self._queues.progress()
        if (gone := self._queues.host.missing([group.ranks[source] for source in sources])) is not None:
            raise lost(gone, about=record, error=OSError("its process has ended"))
        return None

    # ---- sums --------------------------------------------------------------------------------------------------

    def _reduce_scatter(self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        into, op = how
        call = self._call(record, group)

        def act() -> None:
            self._sum(call, call.spans(parts[group.index], which=group.index), into, op)

        return self._begin(call, gives=parts, needs=call.others, users=call.others, act=act)

    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work:
        return self._begin_sum(record, group, x, op, targets=range(group.size))

    def _reduce(self, record: CallRecord, group: Group, x: Tensor, how: tuple[int, str]) -> Work:
        target, op = how
        return self._begin_sum(record, group, x, op, targets=[target])

    def _begin_sum(self, record: CallRecord, group: Group, x: Tensor, op: str, *, targets: Sequence[int]) -> Work:
        """Start a reduction whose result the group indices `targets` receive. If `x` travels in the payload, each of
        them reduces all of `x`; else each rank reduces its slice of `x`, and writes it to them."""
        call = self._call(record, group)
        if travels_in_payload([x]):
            if group.index not in targets:
                return self._begin(call, gives=[x])
            return self._begin(call, gives=[x], needs=call.others, act=lambda: self._sum(call, call.spans(x), x, op))
        start = sum(piece.numel() for piece in x.tensor_split(group.size)[: group.index])
        stop = start + x.tensor_split(group.size)[group.index].numel()
        [reachable] = self._reachable([x], group.ranks)

        def act() -> None:
            spans = call.spans(reachable)
            slices = [span.cut(start, stop=stop) for span in spans]
            copies = [slices[index] for index in targets if index != group.index]
            self._sum(call, slices, reachable[start:stop], op, copies=copies)

        def after() -> None:
            if reachable is not x and group.index in targets:
                put(reachable, into=x)

        return self._begin(call, gives=[reachable], needs=call.others, users=call.others, act=act, after=after)

    def _sum(self, call: QueuedCall, spans: Sequence[Span], into: Tensor, op: str, copies: Sequence[Span] = ()) -> None:
        if call.adds:
            raise RuntimeError(
                f"rank {self.rank} was interrupted while it added up in {call.record}: the inputs are partly "
                "overwritten. End the ranks, and start them again from a checkpoint"
            )
        call.adds = True
        reduce_spans(spans, into=into, copies=copies, op=op, scratch=self._queues.host.scratch)

    # ---- how they are carried out ------------------------------------------------------------------------------

    def _call(self, record: CallRecord, group: Group) -> QueuedCall:
        queue = self._queues.of(group)
        queue.tidy()
        return QueuedCall(self, record=record, queue=queue)

    def _begin(
        self,
        call: QueuedCall,
        *,
        gives: Sequence[Tensor] = (),
        needs: Sequence[int] = (),
        users: Sequence[int] = (),
        act: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> QueuedCall:
        """Post the call, do this rank's part of all calls that are ready, and return the call. Fields: `QueuedCall`."""
        call.needs = needs
        call.act, call.after = (None if job is None else keep_inference_mode(job) for job in (act, after))
        if travels_in_payload(gives):
            call.gives = gives
        else:
            call.gives, call.users, call.in_payload = self._reachable(gives, call.queue.ranks), users, False
        call.queue.post(call)
        self._queues.progress()
        return call

    def _reachable(self, tensors: Sequence[Tensor], ranks: Sequence[int]) -> Sequence[Tensor]:
        """Return `tensors`, or copies in shared memory when a rank of the group cannot read and write some of them."""
        host = self._queues.host
        if host.memory is not None and all(host.memory.read_by(rank) for rank in ranks if rank != self.rank):
            return tensors
        if all(host.slabs.locate(x) is not None for x in tensors):
            return tensors
        sizes = [-(-x.nbytes // _ALIGNED) * _ALIGNED for x in tensors]
        memory = host.slabs.lend(sum(sizes), dtype=torch.uint8).split(sizes)
        copies = [lent[: x.nbytes].view(x.dtype) for lent, x in zip(memory, tensors, strict=True)]
        for copy, x in zip(copies, tensors, strict=True):
            put(x, into=copy)
        return copies

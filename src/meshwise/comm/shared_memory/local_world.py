"""The World of CPU ranks on one host, with collectives in shared memory.

Every rank posts the locations of its tensors (see `group_queue`), and reads the parts that it needs from other ranks.
docs/architecture.md has what is read, written and copied in each collective ("Worlds").
The terms of a sum are added in group order. So a sum has the same bits on every rank, wherever the tensors are."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh, even_split
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.launcher_info import rank_lost_error
from meshwise.comm.api.split_and_reduce import copy, put, reduce_in_order
from meshwise.comm.api.world import Axes, Group, Work, World, keep_inference_mode, message_group
from meshwise.comm.shared_memory.group_queue import GroupQueues, QueuedCall, travels_in_payload
from meshwise.comm.shared_memory.host_connection import PAYLOAD_BYTES
from meshwise.comm.shared_memory.shared_segment import open_segment

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
        """Return a tensor as `World.shared_empty` does; None for a group of one rank. The memory is freed when no rank
        uses it any more. Raises OSError when the system refuses shared memory, RankLostError when a rank has ended."""
        group, host = self.group(axes), self._queues.host
        if group.size == 1:
            return None
        segment = host.slabs.make(max(1, numel * dtype.itemsize)) if group.index == 0 else None
        place = torch.tensor([segment.place if segment else 0])
        self.broadcast(place, axes=axes).wait()
        try:
            memory = segment.memory if segment else open_segment(host.peers[group.ranks[0]].process, place=int(place))
        except OSError as error:
            if (gone := host.ended_rank_behind(group.ranks, error=error)) is not None:
                raise rank_lost_error(gone, about="World.shared_empty", error=error) from error
            raise
        self.barrier(axes=axes)
        if segment:
            segment.close()
        return host.joint_tensors.add(memory, ranks=group.ranks)[: numel * dtype.itemsize].view(dtype)

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
                given = call.queue.tensor(call, index=index, like=take[index], which=me if has_parts else 0)
                copy(given, into=take[index])

        gives = list(give.values()) if users else []
        gives = self._for_others(gives, group) if has_parts else gives[:1]
        return self._begin(call, gives=gives, needs=needs, users=users, act=act)

    def _all_gather(self, record: CallRecord, group: Group, x: Tensor, parts: list[Tensor]) -> Work:
        joint = self._queues.host.joint_tensors.name(parts, ranks=group.ranks)
        if not joint:
            return super()._all_gather(record, group, x, parts)
        call = self._call(record, group)
        call.joint = joint
        put(x, into=parts[group.index])
        return self._begin(call, needs=call.others)

    def _barrier(self, record: CallRecord, group: Group) -> None:
        call = self._call(record, group)
        self._begin(call, needs=call.others)._finish()

    def _sender(self, record: CallRecord, group: Group, sources: Sequence[int]) -> int | None:
        for source in sources:
            if self._queues.of(message_group(group, source=source, target=group.index)).is_ahead(0):
                return source
        self._queues.progress()
        if (gone := self._queues.host.ended_rank([group.ranks[source] for source in sources])) is not None:
            raise rank_lost_error(gone, about=record, error=OSError("its process has ended"))
        return None

    # ---- sums --------------------------------------------------------------------------------------------------

    def _reduce_scatter(self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work:
        into, op = how
        call = self._call(record, group)

        def act() -> None:
            self._sum(call, call.tensors(parts[group.index], which=group.index), into, op)

        gives = self._for_others(parts, group)
        return self._begin(call, gives=gives, needs=call.others, users=call.others, act=act)

    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work:
        """Start a reduction. If `x` fits into the payload, each rank reduces all of `x`. Else each rank reduces its
        slice of `x`, and writes the result into the `x` of the other ranks."""
        call = self._call(record, group)
        if travels_in_payload([x]):
            return self._begin(call, gives=[x], needs=call.others, act=lambda: self._sum(call, call.tensors(x), x, op))
        start, stop = even_split(x.numel(), group.size)[group.index]
        [reachable] = self._reachable([x])

        def act() -> None:
            slices = [x[start:stop] for x in call.tensors(reachable)]
            self._sum(call, slices, slices[group.index], op, copies=[slices[index] for index in call.others])

        others, after = call.others, lambda: put(reachable, into=x)  # copies nothing where both are one tensor
        return self._begin(call, gives=[reachable], needs=others, users=others, act=act, after=after)

    def _sum(self, call: QueuedCall, parts: list[Tensor], into: Tensor, op: str, copies: Sequence[Tensor] = ()) -> None:
        if call.adds:
            raise RuntimeError(
                f"rank {self.rank} was interrupted while it added up in {call.record}: the inputs are partly "
                "overwritten. End the ranks, and start them again from a checkpoint"
            )
        call.adds = True
        reduce_in_order(parts, into=into, op=op, copies=copies)

    # ---- how a call is posted ----------------------------------------------------------------------------------

    def _call(self, record: CallRecord, group: Group) -> QueuedCall:
        queue = self._queues.of(group)
        queue.release_finished()
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
            call.gives, call.users, call.in_payload = self._reachable(gives), users, False
        call.queue.post(call)
        self._queues.progress()
        return call

    def _for_others(self, parts: Sequence[Tensor], group: Group) -> list[Tensor]:
        """Return the parts, with an empty tensor in place of this rank's part, which no other rank reads."""
        return [part[:0] if index == group.index else part for index, part in enumerate(parts)]

    def _reachable(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return `tensors`, or copies in shared memory when some of them are in ordinary memory."""
        host = self._queues.host
        if all(host.slabs.locate(x) is not None for x in tensors):
            return tensors
        sizes = [-(-x.nbytes // _ALIGNED) * _ALIGNED for x in tensors]
        memory = host.slabs.lend(sum(sizes), dtype=torch.uint8, briefly=True).split(sizes)
        copies = [lent[: x.nbytes].view(x.dtype) for lent, x in zip(memory, tensors, strict=True)]
        for target, x in zip(copies, tensors, strict=True):
            put(x, into=target)
        return copies

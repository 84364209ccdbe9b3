"""Communicators of simulated devices that are as strict as NCCL (`SimulatedNccl`).

    | stream       each communicator of a rank has one stream of the device's pool, and calls run there in their order
    | matching     the n-th call of a rank belongs to the n-th call of each other rank: there are no tags
    | messages     a send runs when its receive does; the first one of a communicator connects, and blocks the host
    | creation     blocks until all members have come, and so does the release
    | refusals     int16 and complex numbers, tensors of the host, two ranks on one device

The ranks are threads. A wait for a call that cannot come raises `Deadlock`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accelerator.queued_work import JointWork, QueuedWork, WorkQueues, place_of_call
from accelerator.simulated_streams import SimulatedStreams
from meshwise.comm.api.split_and_reduce import reduce_in_order
from meshwise.comm.network.nccl_world import _OPS, POINT_TO_POINT

_REFUSED = (torch.int16, torch.complex64, torch.complex128, torch.complex32)

Tensors: TypeAlias = Sequence[Tensor]
_Run: TypeAlias = Callable[[Sequence[tuple[Tensors, Tensors]]], None]
"""Function that runs a collective on the (read, written) tensors of each member, in group order."""


class SimulatedNccl:
    """Communicators of all ranks of a run."""

    def __init__(self, queues: WorkQueues) -> None:
        self._queues = queues
        self._made: dict[tuple[str, tuple[int, ...]], _Communicator] = {}

    def backend(self, streams: SimulatedStreams) -> Callable[[str, tuple[int, ...], int], Any]:
        """Return the function that makes process groups for `Communicators` of the rank with these streams."""

        def make(purpose: str, ranks: tuple[int, ...], rank: int) -> Any:
            whole = self._made.setdefault((purpose, ranks), _Communicator(ranks, self._queues))
            whole.join(rank, device=streams.device)
            whole.meet(rank, what=f"the creation of a communicator of ranks {ranks} at {_place()}")
            return _ProcessGroup(whole, streams, stream=streams.create(urgent=purpose == POINT_TO_POINT))

        return make


class _Communicator:
    """Calls of the members of one communicator, matched by their number."""

    def __init__(self, ranks: tuple[int, ...], queues: WorkQueues) -> None:
        self.ranks = ranks
        self.queues = queues
        self._devices: dict[int, torch.device] = {}
        self._calls: dict[tuple[str, int], tuple[JointWork, dict[int, tuple[Tensors, Tensors]]]] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def call(self, line: str, rank: int, *, what: str) -> tuple[JointWork, dict[int, tuple[Tensors, Tensors]]]:
        """Return the collective to which the next call of a rank belongs, and the tensors of its members."""
        number = self._counts.get((line, rank), 0)
        self._counts[line, rank] = number + 1
        found = self._calls.setdefault((line, number), (JointWork(self.ranks, what=what), {}))
        if found[0].missing == [rank]:
            del self._calls[line, number]
        return found

    def join(self, rank: int, *, device: torch.device) -> None:
        """Note the device of a member. Raises RuntimeError if another member has this device."""
        self._devices[rank] = device
        if others := [other for other, own in self._devices.items() if own == device and other != rank]:
            raise RuntimeError(f"ncclInvalidUsage: Duplicate GPU detected: ranks {others[0]} and {rank} on {device}")

    def meet(self, rank: int, *, what: str) -> None:
        """Block until all members have called this method."""
        joint, _ = self.call("meet", rank, what=what)
        self.queues.join(joint, work=QueuedWork(lambda: None, after=(), text=what), rank=rank)
        self.queues.block(joint, rank=rank)


class _Posted:
    """Work of a process group; it keeps its tensors until `wait`, as torch's does."""

    def __init__(self, streams: SimulatedStreams, work: QueuedWork, tensors: Sequence[Tensor], stream: str) -> None:
        self._streams, self._work, self._tensors = streams, work, tensors
        self._clock = streams.races.clock(stream)

    def wait(self) -> None:
        """Let the current stream wait for the work."""
        self._streams.current().wait_works([self._work], clock=self._clock)
        self._tensors = ()


class _ProcessGroup:
    """Methods of torch's `ProcessGroup` that `NcclWorld` calls, for one member."""

    def __init__(self, whole: _Communicator, streams: SimulatedStreams, *, stream: Any) -> None:
        self._whole, self._streams, self._stream = whole, streams, stream
        self._connected = False

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Posted:
        """Start a broadcast."""
        root = options.rootRank
        here = self._whole.ranks.index(self._streams.rank) == root
        return self._post(
            f"broadcast from {root}", tensors if here else [], [] if here else tensors, partial(_broadcast, root)
        )

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Posted:
        """Start an all-reduce."""
        op = _op_name(options.reduceOp)
        return self._post(f"all_reduce {op}", tensors, tensors, partial(_reduce, op))

    def _allgather_base(self, whole: Tensor, x: Tensor) -> _Posted:
        return self._post("all_gather", [x], [whole], _all_gather)

    def _reduce_scatter_base(self, into: Tensor, whole: Tensor, options: Any) -> _Posted:
        op = _op_name(options.reduceOp)
        return self._post(f"reduce_scatter {op}", [whole], [into], partial(_reduce_scatter, op))

    def alltoall(self, into: list[Tensor], parts: list[Tensor]) -> _Posted:
        """Start an all-to-all of parts of any sizes."""
        return self._post("all_to_all", parts, into, _all_to_all, same_size=False)

    def send(self, tensors: list[Tensor], to: int, _tag: int) -> _Posted:
        """Start a send to the other member."""
        return self._post("message", tensors, [], partial(_broadcast, 1 - to), text=f"send to {self._whole.ranks[to]}")

    def recv(self, tensors: list[Tensor], source: int, _tag: int) -> _Posted:
        """Start a receive from the other member."""
        text = f"recv from {self._whole.ranks[source]}"
        return self._post("message", [], tensors, partial(_broadcast, source), text=text)

    def shutdown(self) -> None:
        """Release the communicator; block until all members do."""
        self._whole.meet(self._streams.rank, what=f"the release of the communicator of ranks {self._whole.ranks}")

    def _post(
        self, kind: str, reads: Tensors, writes: Tensors, run: _Run, *, same_size: bool = True, text: str = ""
    ) -> _Posted:
        streams, stream, rank = self._streams, self._stream, self._streams.rank
        tensors = [*reads, *writes]
        text = f"{text or kind} of {sum(x.numel() for x in reads or writes)} {tensors[0].dtype} at {_place()}"
        for tensor in tensors:
            if tensor.dtype in _REFUSED or streams.number_of(tensor) != rank:
                raise RuntimeError(f"NCCL cannot send {tensor.dtype} of {tensor.device}: {text}")
        size = sum(x.numel() for x in reads or writes) if same_size else 0
        joint, calls = self._whole.call("calls", rank, what=text)
        agreed = f"{kind} {size} {tensors[0].dtype}"
        for other, member in joint.members.items():
            if joint.what != agreed:
                raise RuntimeError(
                    f"NCCL would mix different calls: rank {other} calls {member.text}, rank {rank} calls {text}"
                )
        joint.what = agreed
        calls[rank] = ([x.detach() for x in reads], [x.detach() for x in writes])
        joint.run = lambda: run([calls[member] for member in self._whole.ranks])
        stream.wait_stream(streams.current())
        uses = [(x, False) for x in reads] + [(x, True) for x in writes]
        streams.races.use(stream.name, uses=uses, text=text)
        work = QueuedWork(lambda: None, after=stream.queued, text=text, joint=joint)
        stream.append(work)
        if kind == "message" and not self._connected:
            self._connected = True
            self._whole.queues.block(joint, rank=rank)
        return _Posted(streams, work, tensors, stream.name)


def _op_name(op: Any) -> str:
    """Return the name of an operation of torch: `sum`, `max` or `min`."""
    return next(name for name, each in _OPS.items() if each == op)


def _place() -> str:
    return place_of_call(transport=False)


def _broadcast(root: int, calls: Sequence[tuple[Tensors, Tensors]]) -> None:
    for index, (_, writes) in enumerate(calls):
        for x, into in zip(calls[root][0], writes, strict=index != root):
            into.copy_(x)


def _reduce(op: str, calls: Sequence[tuple[Tensors, Tensors]]) -> None:
    parts = [reads[0].clone() for reads, _ in calls]
    total = torch.empty_like(parts[0])
    reduce_in_order(parts, into=total, op=op)
    for _, writes in calls:
        writes[0].copy_(total)


def _all_gather(calls: Sequence[tuple[Tensors, Tensors]]) -> None:
    parts = [reads[0].clone() for reads, _ in calls]
    for _, writes in calls:
        for x, into in zip(parts, writes[0].view(-1).tensor_split(len(parts)), strict=True):
            into.copy_(x)


def _reduce_scatter(op: str, calls: Sequence[tuple[Tensors, Tensors]]) -> None:
    given = [reads[0].clone().view(-1).tensor_split(len(calls)) for reads, _ in calls]
    for index, (_, writes) in enumerate(calls):
        parts = [each[index] for each in given]
        reduce_in_order(parts, into=writes[0], op=op)


def _all_to_all(calls: Sequence[tuple[Tensors, Tensors]]) -> None:
    given = [[x.clone() for x in reads] for reads, _ in calls]
    for index, (_, writes) in enumerate(calls):
        for source, into in enumerate(writes):
            into.copy_(given[source][index])

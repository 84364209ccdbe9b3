"""The World: what joins the ranks.

A scheme never asks which machine it runs on. It asks a `World` for collectives along the named axes of a mesh.
`torch_world` chooses the implementation for processes. `thread_world` has ranks as threads of one process;
`trace_world` has one rank of a world of any size that moves nothing and records everything.

The public methods are defined here, once. They resolve axes to a group, answer a group of one without communication,
check sizes and record the call. Then they call the implementation's hook of the same name with a leading underscore. So
a record, a recording, a count and a hang report mean the same under every implementation.
"""

import abc
import copy
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self, TypeAlias

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flat_parts import Parts, fit, flat, passed, put, require_op, split
from meshwise.comm.api.flight_recorder import (
    CallLine,
    CallRecord,
    FlightRecorder,
    PlacedCall,
    Position,
    RanksDisagree,
    call_site,
    first_difference,
    ranks_text,
)
from meshwise.comm.api.stopwatch import ActivityStopwatch


def as_called(job: Callable[[], None]) -> Callable[[], None]:
    """`job`, to be done in inference mode when that is on now."""
    if not torch.is_inference_mode_enabled():
        return job

    def inside() -> None:
        with torch.inference_mode():
            job()

    return inside


@dataclass(frozen=True)
class Group:
    """The ranks that take part in one collective, and this rank's index among them.

    Calls for another `purpose` are apart from all others of these ranks, as if other ranks made them.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    purpose: str = ""

    @property
    def size(self) -> int:
        """Number of ranks that take part."""
        return len(self.ranks)


def rooted(group: Group, *, root: int) -> Group:
    """Return the group, which has a rank of the index `root`. Raises ValueError otherwise."""
    if not 0 <= root < group.size:
        raise ValueError(f"no index {root} along {'·'.join(group.axes)}, which has {group.size} ranks")
    return group


def line(group: Group, *, source: int, target: int) -> Group:
    """Return the two ends of a message as a group of their own. Raises ValueError when they are not two ranks of the
    group.
    """
    if source == target or not (0 <= source < group.size and 0 <= target < group.size):
        raise ValueError(
            f"no message from index {source} to {target} along {group.axes[0]}, which has {group.size} ranks"
        )
    return Group(group.axes, (group.ranks[source], group.ranks[target]), int(group.index == target), "messages")


Axes: TypeAlias = str | Sequence[str]


class Work:
    """A collective under way. Its tensors belong to it until `wait` returns; `wait` may be called more than once."""

    def __init__(self, world: "World | None" = None, *, record: CallRecord | None = None) -> None:
        self._world = world
        self._new_record = record
        self._done = world is None

    @property
    def ready(self) -> bool:
        """True if `wait` is known to return at once. Some worlds only know it of what was waited for."""
        return self._done

    def wait(self) -> None:
        """Block until the result is in place (on CUDA: until the current stream would see it)."""
        if self._done:
            return
        assert self._world is not None
        assert self._new_record is not None
        if self.ready:
            self._finish()
        else:
            with self._world.flight_recorder.waiting(self._new_record):
                self._finish()
        self._done = True

    def _finish(self) -> None:
        """Complete the collective; each implementation does its own work here."""
        raise NotImplementedError


class World(abc.ABC):
    """Collectives and send/recv along the axes of a mesh. Every tensor must be contiguous and on `device`.

    All calls start the operation and return a `Work`; call `.wait()` at once for the blocking form. `axes` is one name
    or several; the group is ordered row-major by the axes in mesh order. `source`, `target`, `to` are indices within
    the group. A sequence of tensors in place of one tensor means parts, one per group index, of any sizes. One thread
    of a rank at a time calls and waits.
    """

    medium: ClassVar[str] = ""
    """What carries what ranks give each other, in words for a user."""

    def __init__(
        self, *, rank: int, mesh: Mesh, device: torch.device, flight_recorder: FlightRecorder | None = None
    ) -> None:
        self.rank = rank
        self.mesh = mesh
        self.device = device
        self.flight_recorder = flight_recorder or FlightRecorder()
        self._groups: dict[tuple[str, ...], Group] = {}

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.mesh.size

    @property
    def position(self) -> Position:
        """Position of this rank now, whichever view of the world it used."""
        return self.flight_recorder.position

    def over(self, mesh: Mesh) -> Self:
        """Return the same ranks seen over another mesh of the same size; all but the mesh is shared.

        Raises ValueError when the sizes differ.
        """
        if mesh.size != self.size:
            raise ValueError(f"the mesh {mesh} has {mesh.size} ranks, the world {self.size}")
        view = copy.copy(self)
        view.mesh, view._groups = mesh, {}
        return view

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return a tensor in one dim for what collectives move again and again: where the ranks reach it soonest.

        Anything else may be given to a collective too. Contents are unspecified.
        """
        return torch.empty(numel, dtype=dtype, device=self.device)

    def empty_for_reduce(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return a tensor for an activation, or the gradient of one, that the ranks add up: as `empty` makes it."""
        return self.empty(math.prod(shape), dtype=dtype).view(tuple(shape))

    def shared_empty(self, numel: int, *, dtype: torch.dtype, axes: Axes) -> Tensor | None:  # noqa: ARG002 - most have none
        """Return a tensor in one dim that is the same memory for all ranks along `axes`; None where they cannot share
        any.

        Every rank of the group calls it. An all-gather of its equal parts into the whole moves nothing and only waits
        until every rank has written its own. Contents are unspecified.
        """
        return None

    def progress(self) -> None:  # noqa: B027 — most worlds carry out what was called by themselves
        """Do this rank's part in calls that the other ranks have made by now, and return at once.

        Worth a call now and then where much is computed between a collective and its `wait`: others wait for this part.
        """

    def close(self) -> None:  # noqa: B027 — most worlds hold nothing to release
        """Release what joins the ranks. Only the world that `connect` returned needs it; safe to call twice."""

    def group(self, axes: Axes) -> Group:
        """Return this rank's group along `axes`, in mesh order.

        Its own `axes` are those that have more than one rank.
        """
        wanted = (axes,) if isinstance(axes, str) else tuple(axes)
        known = self._groups.get(wanted)
        if known is None:
            if missing := set(wanted).difference(self.mesh.names):
                raise ValueError(f"no axis {sorted(missing)} in the mesh {self.mesh}")
            key = tuple(name for name in self.mesh.names if name in wanted)
            ranks = self.mesh.group(self.rank, axes=key)
            shared = tuple(name for name in key if self.mesh.degree(name) > 1)
            known = self._groups[wanted] = Group(shared or key, ranks, ranks.index(self.rank))
        return known

    def record(self) -> AbstractContextManager[list[CallRecord]]:
        """Collect the records of the collectives called inside the block, on any view of this world."""
        return self.flight_recorder.record()

    def timed(self) -> AbstractContextManager[ActivityStopwatch]:
        """Note what this rank does inside the block, on any view of this world, and what it waits for, and when."""
        return self.flight_recorder.timed(self.device)

    @property
    def rank_mismatch(self) -> int:
        """A number whose sum over all ranks is 0 when every group has called the same collectives on all its ranks."""
        return sum(
            digest * (len(ranks) - 1 if ranks[0] == self.rank else -1)
            for ranks, digest in self.flight_recorder.digests.items()
        )

    # ---- collectives -------------------------------------------------------------------------------------------

    def broadcast(self, x: Tensor, *, axes: Axes, source: int = 0) -> Work:
        """Overwrite `x` everywhere with the source's `x`."""
        group = rooted(self.group(axes), root=source)
        if group.size == 1:
            return Work()
        data = flat(x, given=group.index == source)
        return self._broadcast(self._new_record("broadcast", group, x, how=f"from {source}"), group, data, source)

    def reduce(self, x: Tensor, *, axes: Axes, target: int = 0, op: str = "sum") -> Work:
        """Reduce into the target's `x`; the other ranks' `x` is unspecified afterwards. op: sum, max or min."""
        require_op(op, dtype=x.dtype)
        group = rooted(self.group(axes), root=target)
        if group.size == 1:
            return Work()
        data = flat(x, given=group.index != target)
        return self._reduce(self._new_record("reduce", group, x, how=f"{op} to {target}"), group, data, (target, op))

    def all_reduce(self, x: Tensor, *, axes: Axes, op: str = "sum") -> Work:
        """Reduce in place on every rank, bit-identical on all of them. op: sum, max or min."""
        require_op(op, dtype=x.dtype)
        group = self.group(axes)
        if group.size == 1:
            return Work()
        data = flat(x)
        return self._all_reduce(self._new_record("all_reduce", group, x, how=op), group, data, op)

    def all_gather(self, x: Tensor, *, into: Parts, axes: Axes) -> Work:
        """Gather every rank's `x`, one after the other. `into`: one tensor of size · x.numel() elements, or parts.

        `x` may be the very slice of `into` where it belongs.
        """
        group = self.group(axes)
        if group.size == 1:
            return _copy(x, into)
        data, parts = flat(x, given=True), split(into, group.size)
        fit(x, part=parts[group.index])
        return self._all_gather(self._new_record("all_gather", group, into), group, data, parts)

    def reduce_scatter(self, x: Parts, *, into: Tensor, axes: Axes, op: str = "sum") -> Work:
        """Reduce the parts of `x` and keep this rank's. `into` may be the very slice of `x` where it belongs."""
        require_op(op, dtype=into.dtype)
        group = self.group(axes)
        if group.size == 1:
            return _copy(x, into)
        data, parts = flat(into), split(x, group.size, given=True)
        fit(into, part=parts[group.index])
        return self._reduce_scatter(self._new_record("reduce_scatter", group, x, how=op), group, parts, (data, op))

    def all_to_all(self, x: Parts, *, into: Parts, axes: Axes) -> Work:
        """Exchange parts: part j of this rank's `x` becomes part i of rank j's `into`, i being this rank's index."""
        group = self.group(axes)
        if group.size == 1:
            return _copy(x, into)
        parts, targets = split(x, group.size, given=True), split(into, group.size)
        fit(parts[group.index], part=targets[group.index])
        return self._all_to_all(self._new_record("all_to_all", group, x), group, parts, targets)

    def gather(self, x: Tensor, *, into: Parts | None, axes: Axes, target: int = 0) -> Work:
        """Gather every rank's `x` into the target's `into`; `into` is None elsewhere."""
        group = rooted(self.group(axes), root=target)
        if group.size == 1:
            return _copy(x, passed(into, who="the target of a gather", name="into"))
        data, parts = flat(x, given=True), None
        if group.index == target:
            parts = split(passed(into, who="the target of a gather", name="into"), group.size)
            fit(x, part=parts[target])
        return self._gather(self._new_record("gather", group, x, how=f"to {target}"), group, data, (parts, target))

    def scatter(self, x: Parts | None, *, into: Tensor, axes: Axes, source: int = 0) -> Work:
        """Give each rank its part of the source's `x`; `x` is None elsewhere."""
        group = rooted(self.group(axes), root=source)
        if group.size == 1:
            return _copy(passed(x, who="the source of a scatter", name="x"), into)
        data, parts = flat(into), None
        if group.index == source:
            parts = split(passed(x, who="the source of a scatter", name="x"), group.size, given=True)
            fit(into, part=parts[source])
        return self._scatter(
            self._new_record("scatter", group, into, how=f"from {source}"), group, (parts, source), data
        )

    def send(self, x: Tensor, *, axis: str, to: int) -> Work:
        """Send to group index `to` along one axis; messages between two ranks arrive in the order they were sent."""
        group = self.group(axis)
        ends, data = line(group, source=group.index, target=to), flat(x, given=True)
        return self._send(self._new_record("send", ends, x, how=f"to {to}"), group, data, to)

    def recv(self, x: Tensor, *, axis: str, source: int) -> Work:
        """Receive into `x` from group index `source` along one axis."""
        group = self.group(axis)
        ends, data = line(group, source=source, target=group.index), flat(x)
        return self._recv(self._new_record("recv", ends, x, how=f"from {source}"), group, data, source)

    def barrier(self, *, axes: Axes | None = None) -> None:
        """Return when every rank of the group (all ranks by default) has called it."""
        group = self.group(self.mesh.names if axes is None else axes)
        if group.size > 1:
            record = self._new_record("barrier", group, ())
            with self.flight_recorder.waiting(record):
                self._barrier(record, group)

    def exchange(self, value: Any, *, axes: Axes | None = None) -> list[Any]:
        """Return every rank's small Python value, in group order (all ranks by default). For reports, not for
        tensors.
        """
        group = self.group(self.mesh.names if axes is None else axes)
        if group.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        lengths = torch.empty(group.size, dtype=torch.int64, device=self.device)
        own = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        self.all_gather(own, into=lengths, axes=group.axes).wait()
        parts = [data.new_empty(int(length)) for length in lengths.tolist()]
        self.all_gather(data, into=parts, axes=group.axes).wait()
        return [pickle.loads(bytes(part.tolist())) for part in parts]

    def totals(self, x: Tensor, *, digest: int = 0) -> tuple[list[float], float]:
        """Return the sums over all ranks of a few fp64 numbers and of their `rank_mismatch`, on the host: one
        all-reduce.

        digest: 32 bits that have to be equal on all ranks; otherwise the sum of the mismatches is not 0.
        """
        whole = self.rank_mismatch + digest * (self.size - 1 if self.rank == 0 else -1)
        mismatch = torch.tensor([float(whole)], dtype=torch.float64, device=self.device)
        numbers = torch.cat([x, mismatch])
        self.all_reduce(numbers, axes=self.mesh.names).wait()
        *sums, mismatches = numbers.tolist()
        return sums, mismatches

    def send_value(self, value: Any, *, axis: str, to: int) -> list[Work]:
        """Send a small Python value to group index `to` along one axis, in two messages: its length, and itself."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        length = torch.tensor([data.numel()], device=self.device)
        return [self.send(part, axis=axis, to=to) for part in (length, data)]

    def recv_value(self, *, axis: str, source: int) -> Any:
        """Return the Python value that group index `source` along one axis sends next."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.recv(length, axis=axis, source=source).wait()
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.recv(data, axis=axis, source=source).wait()
        return pickle.loads(bytes(data.tolist()))

    # ---- what an implementation writes: the tensors it gets are flat, contiguous and outside autograd ------------

    @abc.abstractmethod
    def _broadcast(self, record: CallRecord, group: Group, x: Tensor, source: int) -> Work: ...

    @abc.abstractmethod
    def _reduce(self, record: CallRecord, group: Group, x: Tensor, how: tuple[int, str]) -> Work: ...

    @abc.abstractmethod
    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work: ...

    @abc.abstractmethod
    def _all_gather(self, record: CallRecord, group: Group, x: Tensor, parts: list[Tensor]) -> Work: ...

    @abc.abstractmethod
    def _reduce_scatter(
        self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]
    ) -> Work: ...

    @abc.abstractmethod
    def _all_to_all(self, record: CallRecord, group: Group, parts: list[Tensor], into: list[Tensor]) -> Work: ...

    @abc.abstractmethod
    def _gather(self, record: CallRecord, group: Group, x: Tensor, how: tuple[list[Tensor] | None, int]) -> Work: ...

    @abc.abstractmethod
    def _scatter(
        self, record: CallRecord, group: Group, how: tuple[list[Tensor] | None, int], into: Tensor
    ) -> Work: ...

    @abc.abstractmethod
    def _send(self, record: CallRecord, group: Group, x: Tensor, to: int) -> Work: ...

    @abc.abstractmethod
    def _recv(self, record: CallRecord, group: Group, x: Tensor, source: int) -> Work: ...

    @abc.abstractmethod
    def _barrier(self, record: CallRecord, group: Group) -> None: ...

    def _meet_to_close(self) -> None:
        """Return when every rank has called it.

        A collective of its own, so that a rank which leaves while others still count on it shows up as a disagreement.
        Raises RanksDisagree if the ranks of a group have called different collectives and no error has said so yet.
        """
        group = self.group(self.mesh.names)
        record = self._new_record("close", group, ())
        with self.flight_recorder.waiting(record):
            self._barrier(record, group)
        if group.size > 1 and self.totals(torch.zeros(0, dtype=torch.float64, device=self.device))[1]:
            require_same(
                dict(enumerate(self.exchange((list(self.flight_recorder.recent), self.flight_recorder.counts))))
            )

    # ---- records ------------------------------------------------------------------------------------------------

    def _new_record(self, kind: str, group: Group, x: Parts, *, how: str = "") -> CallRecord:
        """Give the call its number and write it into the flight_recorder."""
        first = x if isinstance(x, Tensor) else x[0] if x else None
        if first is not None and first.is_meta and self.device.type != "meta":
            raise ValueError(f"{kind} of a tensor without values; these ranks exchange what is on {self.device}")
        shape = tuple(x.shape) if isinstance(x, Tensor) else (sum(part.numel() for part in x),)
        dtype = "" if first is None else str(first.dtype).removeprefix("torch.")
        size = 0 if first is None else math.prod(shape) * first.element_size()
        record = CallRecord(self.flight_recorder.calls, kind, group.axes, shape, dtype, size, call_site(), how)
        self.flight_recorder.write(record, ranks=group.ranks)
        return record


def _copy(x: Parts, into: Parts) -> Work:
    """Return the collective of a group of one."""
    [source], [target] = split(x, 1, given=True), split(into, 1)
    fit(source, part=target)
    put(source, into=target)
    return Work()


def require_same(found: Mapping[int, tuple[Sequence[PlacedCall], Mapping[CallLine, int]]]) -> NoReturn:
    """Raise RanksDisagree with what differs first. `found`: of each rank its last calls, and how many on each line."""
    if difference := first_difference({rank: recent for rank, (recent, _) in found.items()}):
        raise RanksDisagree(difference[0])
    for line in {line: None for _, counts in found.values() for line in counts if not line.point_to_point}:
        counts = {rank: found[rank][1].get(line, 0) for rank in line.ranks}
        most = max(counts, key=counts.__getitem__)
        if counts[most] != min(counts.values()):
            last = next((str(call.record) for call in reversed(found[most][0]) if call.line == line), "long ago")
            numbers = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
            raise RanksDisagree(
                f"{ranks_text(line.ranks)} have made different numbers of calls together: {numbers}; the last of rank "
                f"{most} is {last}"
            )
    raise RanksDisagree("the ranks of a group have called different collectives, longer ago than calls are kept")

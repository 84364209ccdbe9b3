"""The World: collectives between ranks along the named axes of a mesh, with one interface for every transport.

docs/architecture.md has the kinds of worlds ("Worlds"). The public collectives are implemented in this file. One of
them finds the group of the axes, returns at once for a group of one rank, checks sizes and records the call. Then the
method calls the subclass's `_move`, or the subclass's method of the same name with a leading underscore. So records,
counts and hang reports mean the same in every subclass.

`EmulatedLink` emulates a slow network between ranks that share a host: each wait ends no earlier than on that network.
docs/local_steps.md has times ("Slow links on a laptop"). A transfer begins when this rank makes the call. If this rank
waits for other ranks, for more than 2 ms and more than a tenth of the emulated time, the transfer begins after the
wait. The data itself moves as always, so a network that is slower than the emulated one stays slower."""

import abc
import copy
import math
import pickle
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Self, TypeAlias

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.base.tickets import Tickets
from meshwise.comm.api.flight_recorder import (
    ActivityStopwatch,
    CallLine,
    CallRecord,
    FlightRecorder,
    PlacedCall,
    RanksDisagree,
    bus_factor,
    call_site,
    first_difference,
    ranks_text,
)
from meshwise.comm.api.side_by_side import SideBySide
from meshwise.comm.api.split_and_reduce import Parts, flat, put, require_fit, require_op, require_passed, split
from meshwise.comm.api.streams import streams_of

_BITS: Mapping[str, float] = {"k": 1e3, "M": 1e6, "G": 1e9}
_SECONDS: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK = re.compile(r"(\d+(?:\.\d+)?)([kMG])bit +(\d+(?:\.\d+)?)(us|ms|s)((?: +[a-z]\w*)*)")


WORLDS: "Tickets[World]" = Tickets()
"""Worlds by `World.ticket`."""


@dataclass
class EmulatedLink:
    """Link of one rank to the others, for calls along some axes. `bandwidth` in bytes per second, `delay` in seconds.

    | text    as `parse` read it
    | axes    only calls along one of these axes are slow; empty: all calls. `World.over` adds parts of joint axes"""

    text: str
    bandwidth: float
    delay: float
    axes: frozenset[str] = frozenset()
    _free: float = field(default=0.0, init=False)

    @classmethod
    def parse(cls, text: str) -> "EmulatedLink":
        """Return the link that `text` describes: `1Gbit 2ms`, or `1Gbit 2ms dp` for dp alone. Raises ValueError."""
        found = _LINK.fullmatch(text.strip())
        if found is None or not float(found[1]):
            raise ValueError(
                f"emulate={text!r} is no bandwidth with a delay; write '1Gbit 2ms', or '100Mbit 20ms dp' for calls "
                "along dp alone"
            )
        bandwidth, delay = float(found[1]) * _BITS[found[2]] / 8, float(found[3]) * _SECONDS[found[4]]
        return cls(text, bandwidth, delay, frozenset(found[5].split()))

    def seconds(self, record: CallRecord, *, ranks: int) -> tuple[float, float]:
        """Return the seconds for which a call on `ranks` ranks occupies the link, and the seconds of its delays. Return
        0 and 0 for a call along other axes than `axes`."""
        if self.axes and not self.axes.intersection(record.axes):
            return 0.0, 0.0
        whole = record.bytes * (ranks if record.kind in ("gather", "scatter") else 1)
        hops = 1.0 if record.point_to_point else math.log2(ranks) * (2 if record.kind == "all_reduce" else 1)
        return bus_factor(record.kind, ranks=ranks) * whole / self.bandwidth, hops * self.delay

    def call(self, finish: Callable[[], None], *, record: CallRecord, ranks: int, posted: float) -> None:
        """Run `finish`, which waits for the other ranks, then sleep until the call would be done on the link.

        posted: time of the call in seconds of `time.monotonic`."""
        began = time.monotonic()
        finish()
        ended = time.monotonic()
        transfer, delays = self.seconds(record, ranks=ranks)
        blocked = ended - began > max(2e-3, (transfer + delays) / 10)
        self._free = max(ended if blocked else posted, self._free) + transfer
        time.sleep(max(0.0, self._free + delays - time.monotonic()))


def keep_inference_mode(job: Callable[[], None]) -> Callable[[], None]:
    """Return `job`, wrapped so that it runs in inference mode if inference mode is on now."""
    if not torch.is_inference_mode_enabled():
        return job

    def inside() -> None:
        with torch.inference_mode():
            job()

    return inside


@dataclass(frozen=True)
class Group:
    """The ranks that take part in one collective, and this rank's index among them."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """World ranks in group order: row-major by the axes in mesh order."""
    index: int
    """Position of this rank in `ranks`."""
    purpose: str = ""
    """Name of a separate sequence of calls, such as `messages`. Calls with different purposes never match."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def own(self, sizes: Sequence[int]) -> int:
        """Return this rank's of the ranks' sizes. Equal sizes need no index, so ranks share code of torch.compile."""
        return sizes[0] if min(sizes) == max(sizes) else sizes[self.index]


def require_root(group: Group, *, root: int) -> Group:
    """Return `group` itself. Raises ValueError unless `root` is an index of the group."""
    if not 0 <= root < group.size:
        raise ValueError(f"no index {root} along {'·'.join(group.axes)}, which has {group.size} ranks")
    return group


def message_group(group: Group, *, source: int, target: int) -> Group:
    """Return the group of two ranks, source and target, for a message between these indices of `group`. Raises
    ValueError unless they are two different indices of the group."""
    if source == target or not (0 <= source < group.size and 0 <= target < group.size):
        raise ValueError(f"no message from index {source} to {target} along {group.axes[0]}, of {group.size} ranks")
    return Group(group.axes, (group.ranks[source], group.ranks[target]), int(group.index == target), "messages")


Axes: TypeAlias = str | Sequence[str]
"""Name of one mesh axis, or names of several."""


class Work:
    """A collective in progress. Its tensors must not be used until `wait` returns; then `wait` may be called again."""

    def __init__(
        self,
        world: "World | None" = None,
        *,
        record: CallRecord | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """finish: called by the first `wait`, to complete the collective; None if a subclass overrides `_finish`.
        world: None if `finish` only waits for other works. Without `world` and `finish` the work is complete."""
        self._world = world
        self._record = record
        self._at_wait = finish
        self._done = world is None and finish is None
        self._posted = time.monotonic()

    @property
    def ready(self) -> bool:
        """True if `wait` is known to return at once. In some worlds it is True only after `wait`."""
        return self._done

    def wait(self) -> None:
        """Block until the result is complete; on CUDA, block the current stream only. Raises RankLostError."""
        if self._done:
            return
        if self._world is None or (self._world.link is None and self.ready):
            self._finish()
        else:
            assert self._record is not None
            with self._world.flight_recorder.waiting(self._record):
                self._world.over_link(self._finish, record=self._record, posted=self._posted)
        self._done = True

    def _finish(self) -> None:
        if self._at_wait is None:
            raise RuntimeError("an earlier wait for this collective raised, so its result is not complete")
        finish, self._at_wait = self._at_wait, None  # `finish` may hold copies of tensors
        with torch._C.DisableTorchFunction():  # modes that see each function, such as dropout's, need not see these
            finish()


def wait_all(works: Iterable[Work]) -> None:
    """Wait for several works, in their order."""
    for work in works:
        work.wait()


class World(abc.ABC):
    """Collectives, send and recv along the axes of a mesh. Every tensor must be contiguous and on `device`. Each method
    starts a collective and returns a `Work`; to block, call `.wait()` on it at once. `axes` is one name or several; the
    group is ordered row-major by the axes in mesh order. `source`, `target` and `to` are indices of the group.
    `Parts` is one tensor that is cut into equal parts, or a list with one part per group index, of any sizes.
    Only one thread of a rank at a time may call and wait. Several `World` objects may be views of one world."""

    medium: ClassVar[str] = ""
    """Name of the transport, for messages to the user: `shared memory`, `gloo`, `NCCL`, `threads`."""
    link: EmulatedLink | None = None
    """Slower network that this rank emulates; views of the world made before it was set do not. None: no emulation."""
    turn: AbstractContextManager[Any] = nullcontext()
    """Context in which a thread of this rank computes; it may be entered many times, by several threads."""

    def __init__(
        self, *, rank: int, mesh: Mesh, device: torch.device, flight_recorder: FlightRecorder | None = None
    ) -> None:
        self.rank = rank
        self.mesh = mesh
        self.device = device
        self.streams = streams_of(device)
        self.flight_recorder = flight_recorder or FlightRecorder()
        self.side_by_side = SideBySide(self.flight_recorder)
        self._groups: dict[tuple[str, ...], Group] = {}
        self.ticket = WORLDS.add(self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.mesh.size

    @property
    def oldest_running_call(self) -> CallRecord | None:
        """Oldest call whose `wait` has returned, but which the device has not finished. None if it has finished all."""
        return None

    def over(self, mesh: Mesh) -> Self:
        """Return a view of this world over another mesh. Raises ValueError if the mesh has another number of ranks."""
        if mesh.size != self.size:
            raise ValueError(f"the mesh {mesh} has {mesh.size} ranks, the world {self.size}")
        view = copy.copy(self)
        view.mesh, view._groups = mesh, {}
        view.ticket = WORLDS.add(view)
        if self.link is not None:  # views share the link, which is occupied by the calls of all of them
            self.link.axes |= {part for name, parts in mesh.joint if name in self.link.axes for part in parts}
        return view

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized 1-D tensor for repeated use in collectives, in memory that other ranks read fast."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def empty_for_reduce(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor as by `empty`, for an activation or gradient that the ranks add up."""
        return self.empty(math.prod(shape), dtype=dtype).view(tuple(shape))

    def shared_empty(self, numel: int, *, dtype: torch.dtype, axes: Axes) -> Tensor | None:  # noqa: ARG002 - most have none
        """Return an uninitialized 1-D tensor in memory that all ranks along `axes` share; None if this world cannot.
        Every rank of the group calls this method. An all-gather of the tensor's equal parts into the tensor copies
        nothing: each rank only waits until every rank has written its part."""
        return None

    def prepare(self, *, groups: Iterable[Group] = (), lines: Iterable[tuple[int, int]] = ()) -> None:  # noqa: B027
        """Open the connections of `groups`, and of the messages of each line (source rank, target rank). All members
        of a group, and both ranks of a line, call this method at the same time. Without it some worlds connect a group
        at its first collective, which then blocks until all ranks of the group call it."""

    def progress(self) -> None:  # noqa: B027 — most worlds need no progress calls
        """Do this rank's part of collectives for which other ranks wait now, without blocking. Call it now and then
        if a long computation lies between a collective and its `wait`."""

    def close(self) -> None:  # noqa: B027 — most worlds hold nothing to release
        """Release the connections between the ranks. Every rank of a world of processes calls `close`; other worlds do
        not need it. A second call does nothing. Raises RanksDisagree when the ranks called different collectives."""

    def group(self, axes: Axes) -> Group:
        """Return this rank's group along `axes`, for any order of the names. `Group.axes` are in mesh order; axes of
        one rank are left out, unless all have one rank. Raises ValueError for a name that the mesh does not have."""
        wanted = (axes,) if isinstance(axes, str) else tuple(axes)
        known = self._groups.get(wanted)
        if known is None:
            key = self.mesh.expand(wanted)
            ranks = self.mesh.group(self.rank, axes=key)
            shared = tuple(name for name in key if self.mesh.degree(name) > 1)
            known = self._groups[wanted] = Group(shared or key, ranks, ranks.index(self.rank))
        return known

    def record(self) -> AbstractContextManager[list[CallRecord]]:
        """Collect the records of this rank's collectives inside the block, on any view of this world, in a list."""
        return self.flight_recorder.record()

    def timed(self) -> AbstractContextManager[ActivityStopwatch]:
        """Measure this rank's activities and waits inside the block. Raises RuntimeError inside another such block."""
        return self.flight_recorder.timed(self.streams)

    def rank_mismatch(self, among: Group) -> int:
        """Return a number. The numbers of all ranks of `among` add up to 0 if these ranks called the same collectives.
        Calls of a group that has other ranks too are left out."""
        return sum(
            digest * (len(ranks) - 1 if ranks[0] == self.rank else -1)
            for ranks, digest in self.flight_recorder.digests.items()
            if among.size == self.size or set(ranks) <= set(among.ranks)
        )

    # ---- collectives -------------------------------------------------------------------------------------------

    def broadcast(self, x: Tensor, *, axes: Axes, source: int = 0) -> Work:
        """Overwrite `x` on every rank with the `x` of group index `source`."""
        group = require_root(self.group(axes), root=source)
        if group.size == 1:
            return Work()
        data = flat(x, read_only=group.index == source)
        return self._broadcast(self._new_record("broadcast", group, x, how=f"from {source}"), group, data, source)

    def reduce(self, x: Tensor, *, axes: Axes, target: int = 0, op: str = "sum") -> Work:
        """Reduce into the `x` of group index `target`; afterwards the `x` of other ranks is undefined. op: sum, max,
        min. A reduce may take as long as an all-reduce."""
        require_op(op, dtype=x.dtype)
        group = require_root(self.group(axes), root=target)
        if group.size == 1:
            return Work()
        data = flat(x, read_only=group.index != target)
        return self._reduce(self._new_record("reduce", group, x, how=f"{op} to {target}"), group, data, (target, op))

    def all_reduce(self, x: Tensor, *, axes: Axes, op: str = "sum") -> Work:
        """Reduce `x` in place, with the same bits on all ranks. op: sum, max or min."""
        require_op(op, dtype=x.dtype)
        group = self.group(axes)
        if group.size == 1:
            return Work()
        with torch._C.DisableTorchFunction():
            data = flat(x)
            return self._all_reduce(self._new_record("all_reduce", group, x, how=op), group, data, op)

    def all_gather(self, x: Tensor, *, into: Parts, axes: Axes) -> Work:
        """Gather every rank's `x` into `into`: one tensor of size · x.numel() elements, or one tensor per group index.
        `x` may be this rank's slice of `into`."""
        group = self.group(axes)
        if group.size == 1:
            return _copy(x, into)
        with torch._C.DisableTorchFunction():
            data, parts = flat(x, read_only=True), split(into, group.size)
            require_fit(x, part=parts[group.index])
            return self._all_gather(self._new_record("all_gather", group, into), group, data, parts)

    def reduce_scatter(self, x: Parts, *, into: Tensor, axes: Axes, op: str = "sum") -> Work:
        """Reduce the parts of all ranks' `x`; put this rank's part into `into`, which may be its own part of `x`."""
        require_op(op, dtype=into.dtype)
        group = self.group(axes)
        if group.size == 1:
            return _copy(x, into)
        with torch._C.DisableTorchFunction():
            data, parts = flat(into), split(x, group.size, read_only=True)
            require_fit(into, part=parts[group.index])
            return self._reduce_scatter(self._new_record("reduce_scatter", group, x, how=op), group, parts, (data, op))

    def all_to_all(self, x: Parts, *, into: Parts, axes: Axes) -> Work:
        """Exchange parts: part j of the `x` of group index i becomes part i of the `into` of group index j."""
        group = self.group(axes)
        if group.size == 1:
            return _copy(x, into)
        parts, targets = split(x, group.size, read_only=True), split(into, group.size)
        require_fit(parts[group.index], part=targets[group.index])
        record = self._new_record("all_to_all", group, x)
        return self._move(record, group, dict(enumerate(parts)), dict(enumerate(targets)))

    def gather(self, x: Tensor, *, into: Parts | None, axes: Axes, target: int = 0) -> Work:
        """Gather every rank's `x` into the `into` of group index `target`; other ranks pass `into=None`."""
        group = require_root(self.group(axes), root=target)
        if group.size == 1:
            return _copy(x, require_passed(into, who="the target of a gather", name="into"))
        data, parts = flat(x, read_only=True), None
        if group.index == target:
            parts = split(require_passed(into, who="the target of a gather", name="into"), group.size)
            require_fit(x, part=parts[target])
        record = self._new_record("gather", group, x, how=f"to {target}")
        return self._move(record, group, {target: data}, dict(enumerate(parts or [])))

    def scatter(self, x: Parts | None, *, into: Tensor, axes: Axes, source: int = 0) -> Work:
        """Put each rank's part of the `x` of group index `source` into `into`; other ranks pass `x=None`."""
        group = require_root(self.group(axes), root=source)
        if group.size == 1:
            return _copy(require_passed(x, who="the source of a scatter", name="x"), into)
        data, parts = flat(into), None
        if group.index == source:
            parts = split(require_passed(x, who="the source of a scatter", name="x"), group.size, read_only=True)
            require_fit(into, part=parts[source])
        record = self._new_record("scatter", group, into, how=f"from {source}")
        return self._move(record, group, dict(enumerate(parts or [])), {source: data})

    def send(self, x: Tensor, *, axis: str, to: int) -> Work:
        """Send `x` to group index `to` along one axis. Messages between two ranks arrive in the order of sending."""
        group = self.group(axis)
        ends, data = message_group(group, source=group.index, target=to), flat(x, read_only=True)
        return self._move(self._new_record("send", ends, x, how=f"to {to}"), ends, {1: data}, {})

    def recv(self, x: Tensor, *, axis: str, source: int) -> Work:
        """Receive into `x` from group index `source` along one axis."""
        group = self.group(axis)
        ends, data = message_group(group, source=source, target=group.index), flat(x)
        return self._move(self._new_record("recv", ends, x, how=f"from {source}"), ends, {}, {0: data})

    def recv_any(self, x: Tensor, *, axis: str, sources: Sequence[int]) -> int:
        """Block until one of the group indices `sources` along one axis has sent a message, receive it into `x`, and
        return the index. No other message from these ranks to this one may have the size and dtype of `x`."""
        group = self.group(axis)
        size, dtype = x.numel() * x.element_size(), str(x.dtype).removeprefix("torch.")
        calls, site = self.flight_recorder.calls, call_site()
        record = CallRecord(calls, "recv", group.axes, tuple(x.shape), dtype, size, site, "from any")
        with self.flight_recorder.waiting(record):
            return self._recv_any(record, group, x, sources)

    def barrier(self, *, axes: Axes | None = None) -> None:
        """Return when every rank of the group (by default, all ranks) has called this method."""
        group = self.group(self.mesh.names if axes is None else axes)
        if group.size > 1:
            record = self._new_record("barrier", group, ())
            with self.flight_recorder.waiting(record):
                self.over_link(lambda: self._barrier(record, group), record=record, posted=time.monotonic())

    def over_link(self, finish: Callable[[], None], *, record: CallRecord, posted: float) -> None:
        """Run `finish`, which completes a call, as slowly as over `link`. `posted`: `time.monotonic()` at the call."""
        if self.link is None:
            finish()
        else:
            self.link.call(finish, record=record, ranks=self.group(record.axes).size, posted=posted)

    def exchange(self, value: Any, *, axes: Axes | None = None) -> list[Any]:
        """Gather a small Python `value` from every rank along `axes`, or from all ranks for None, pickled as by torch's
        `all_gather_object`. Block, and return the values in group order, this rank's included."""
        group = self.group(self.mesh.names if axes is None else axes)
        if group.size == 1:
            return [value]
        data = self._bytes_of(value)
        lengths = torch.empty(group.size, dtype=torch.int64, device=self.device)
        own = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        self.all_gather(own, into=lengths, axes=group.axes).wait()
        parts = [data.new_empty(int(length)) for length in lengths.tolist()]
        self.all_gather(data, into=parts, axes=group.axes).wait()
        return [_value_of(part) for part in parts]

    def totals(
        self, x: Tensor, *, digest: int = 0, digest_axes: Axes | None = None, axes: Axes | None = None, common: int = 0
    ) -> tuple[list[float], float]:
        """Sum `x`, an fp64 vector, over the ranks along `axes` (None: all ranks) by one blocking all-reduce. Return the
        sums, and a number that is not 0 if the ranks called different collectives or if their digests differ. digest:
        32 bits that must be equal on the ranks along `digest_axes`, or on all ranks for None. common: a second digest
        of 32 bits, which must be equal on the ranks along `axes`."""
        group = self.group(self.mesh.names if digest_axes is None else digest_axes)
        among = self.group(self.mesh.names if axes is None else axes)
        whole = self.rank_mismatch(among) + digest * (group.size - 1 if group.index == 0 else -1)
        whole += common * (among.size - 1 if among.index == 0 else -1)
        mismatch = torch.full((1,), float(whole), dtype=torch.float64, device=self.device)  # no copy from the host
        numbers = torch.cat([x, mismatch])
        self.all_reduce(numbers, axes=among.axes).wait()
        *sums, mismatches = numbers.tolist()
        return sums, mismatches

    def send_value(self, value: Any, *, axis: str, to: int) -> list[Work]:
        """Send a small Python value to group index `to` along one axis, as two messages; wait for both."""
        data = self._bytes_of(value)
        length = torch.tensor([data.numel()], device=self.device)
        return [self.send(part, axis=axis, to=to) for part in (length, data)]

    def recv_value(self, *, axis: str, source: int) -> Any:
        """Block until group index `source` along one axis has sent a value by `send_value`, and return the value."""
        length = torch.empty(1, dtype=torch.int64, device=self.device)  # zeros would launch a kernel: `receive_starts`
        self.recv(length, axis=axis, source=source).wait()
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.recv(data, axis=axis, source=source).wait()
        return _value_of(data)

    def _bytes_of(self, value: Any) -> Tensor:
        """Return a pickled value as uint8 elements on the device."""
        return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)

    # ---- implemented by subclasses: the tensors passed are 1-D, contiguous and outside autograd -------------------

    @abc.abstractmethod
    def _all_reduce(self, record: CallRecord, group: Group, x: Tensor, op: str) -> Work: ...

    @abc.abstractmethod
    def _reduce_scatter(
        self, record: CallRecord, group: Group, parts: list[Tensor], how: tuple[Tensor, str]
    ) -> Work: ...

    @abc.abstractmethod
    def _barrier(self, record: CallRecord, group: Group) -> None: ...

    def _reduce(self, record: CallRecord, group: Group, x: Tensor, how: tuple[int, str]) -> Work:
        return self._all_reduce(record, group, x, how[1])

    # A world implements `_move`, and the methods after it that it can do faster.

    @abc.abstractmethod
    def _move(self, record: CallRecord, group: Group, give: Mapping[int, Tensor], take: Mapping[int, Tensor]) -> Work:
        """Send tensors to ranks and receive tensors from them. `give` and `take` have group indices as keys, this
        rank's index included. The group of a message is its source and its target (`message_group`)."""

    def _broadcast(self, record: CallRecord, group: Group, x: Tensor, source: int) -> Work:
        if group.index == source:
            return self._move(record, group, {index: x for index in range(group.size) if index != source}, {})
        return self._move(record, group, {}, {source: x})

    def _all_gather(self, record: CallRecord, group: Group, x: Tensor, parts: list[Tensor]) -> Work:
        return self._move(record, group, dict.fromkeys(range(group.size), x), dict(enumerate(parts)))

    def _recv_any(self, record: CallRecord, group: Group, x: Tensor, sources: Sequence[int]) -> int:
        while (source := self._sender(record, group, sources)) is None:
            time.sleep(2e-4)
        self.recv(x, axis=record.axes[0], source=source).wait()
        return source

    def _sender(self, record: CallRecord, group: Group, sources: Sequence[int]) -> int | None:
        """Return one of `sources` that has sent a message which this rank has not received; None if there is none."""
        raise NotImplementedError(f"{self.medium} cannot wait for one of several senders; use ranks on CPUs")

    def _meet_to_close(self) -> None:
        """Block until every rank has called this method. The record of the call has the kind `close`, so a rank that
        closes while others call a collective is reported. Raises RanksDisagree if the ranks of a group have called
        different collectives, and no earlier error has reported it."""
        group = self.group(self.mesh.names)
        record = self._new_record("close", group, ())
        with self.flight_recorder.waiting(record):
            self._barrier(record, group)
        if group.size > 1 and self.totals(torch.zeros(0, dtype=torch.float64, device=self.device))[1]:
            recorder = self.flight_recorder
            raise_difference(dict(enumerate(self.exchange((list(recorder.recent), recorder.counts)))))

    # ---- records ------------------------------------------------------------------------------------------------

    def _new_record(self, kind: str, group: Group, x: Parts, *, how: str = "") -> CallRecord:
        """Return the record of a call, after writing it into the flight recorder. `x`: tensor or parts of the call."""
        first = x if isinstance(x, Tensor) else x[0] if x else None
        if first is not None and first.is_meta and self.device.type != "meta":
            raise ValueError(f"{kind} of a meta tensor, which has no values; pass a tensor on {self.device}")
        shape = tuple(x.shape) if isinstance(x, Tensor) else (sum(part.numel() for part in x),)
        dtype = "" if first is None else str(first.dtype).removeprefix("torch.")
        size = 0 if first is None else math.prod(shape) * first.element_size()
        record = CallRecord(self.flight_recorder.calls, kind, group.axes, shape, dtype, size, call_site(), how)
        self.flight_recorder.write(record, ranks=group.ranks)
        return record


def _value_of(data: Tensor) -> Any:
    """Return the value whose pickle is in `data`, uint8 elements on any device."""
    return pickle.loads(data.cpu().numpy().data)


def _copy(x: Parts, into: Parts) -> Work:
    """Copy `x` into `into` as the result of a collective of one rank, and return complete work."""
    [source], [target] = split(x, 1, read_only=True), split(into, 1)
    require_fit(source, part=target)
    put(source, into=target)
    return Work()


def raise_difference(found: Mapping[int, tuple[Sequence[PlacedCall], Mapping[CallLine, int]]]) -> NoReturn:
    """Raise RanksDisagree, always, with the first difference between the calls of the ranks. Call this function when
    the ranks are known to differ. `found`: for each rank, its last calls and its number of calls on each line."""
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
    raise RanksDisagree("the ranks of a group have called different collectives, whose records are no longer kept")

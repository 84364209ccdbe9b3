"""The World: what joins the ranks.

A scheme never asks which machine it runs on. It asks a `World` for collectives along the named axes of a mesh, and
three implementations answer: `torch_world` (c10d: gloo and NCCL), `thread_world` (ranks as threads of one process) and
`trace_world` (one rank of a world of any size that moves nothing and records everything).

The public methods live here, once: they resolve the axes to a group, answer a group of one without communication,
check the sizes, stamp the call and hand it to the implementation's hook of the same name with a leading underscore.
So a stamp, a recording, a count and a hang report mean the same under every implementation.
"""

from __future__ import annotations

import abc
import contextlib
import pickle
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshwise.mesh import Mesh

Axes: TypeAlias = str | Sequence[str]
Parts: TypeAlias = Tensor | Sequence[Tensor]

_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Group:
    """The ranks that take part in one collective, and this rank's index among them."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Stamp:
    """One collective as one rank called it. Ranks agree when everything but `site` is equal.

    `bytes` is the payload of the whole collective as one rank sees it: the tensor of a broadcast, reduce, all-reduce,
    send or recv; the gathered side of a gather or all-gather; the whole side of a scatter, reduce-scatter or
    all-to-all.
    """

    sequence: int
    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    site: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"#{self.sequence} {self.kind}[{'·'.join(self.axes)}] {shape} {self.dtype} at {self.site}"


@dataclass(frozen=True)
class Position:
    """Where a rank is: the last collective it called, and since when it has been waiting for it (None: it is not)."""

    stamp: Stamp | None = None
    waiting_since: float | None = None


class Work:
    """A collective under way. Its tensors belong to it until `wait` returns; `wait` may be called more than once."""

    def __init__(self, world: World | None = None, stamp: Stamp | None = None) -> None:
        self._world = world
        self._stamp = stamp
        self._done = world is None

    def wait(self) -> None:
        """Block until the result is in place (on CUDA: until the current stream would see it)."""
        if self._done or self._world is None:
            return
        self._world.position = Position(self._stamp, time.monotonic())
        self._finish()
        self._world.position = Position(self._stamp)
        self._done = True

    def _finish(self) -> None:
        """What an implementation does to complete the collective."""
        raise NotImplementedError


class World(abc.ABC):
    """Collectives and send/recv along the axes of a mesh. Every tensor must be contiguous and on `device`.

    All calls start the operation and return a `Work`; call `.wait()` at once for the blocking form. `axes` is one name
    or several; the group is ordered row-major by the axes in mesh order. `source`, `target`, `to` are indices within
    the group. A sequence of tensors in place of one tensor means parts, one per group index, of any sizes.
    """

    def __init__(self, *, rank: int, mesh: Mesh, device: torch.device) -> None:
        self.rank = rank
        self.mesh = mesh
        self.device = device
        self.position = Position()
        self.check = False
        self._sequence = 0
        self._digests: dict[tuple[str, ...], int] = {}
        self._groups: dict[tuple[str, ...], Group] = {}
        self._recordings: list[list[Stamp]] = []

    @property
    def size(self) -> int:
        return self.mesh.size

    @abc.abstractmethod
    def over(self, mesh: Mesh) -> World:
        """The same ranks seen over another mesh of the same size; the transport is shared.

        Raises ValueError when the sizes differ.
        """

    def close(self) -> None:
        """Release what joins the ranks. Only the world that `connect` returned needs it; safe to call twice."""

    def group(self, axes: Axes) -> Group:
        """This rank's group along `axes` (in mesh order whatever order they are given in)."""
        wanted = {axes} if isinstance(axes, str) else set(axes)
        key = tuple(name for name in self.mesh.names if name in wanted)
        if missing := wanted - set(key):
            raise ValueError(f"no axis {sorted(missing)} in the mesh {self.mesh}")
        if key not in self._groups:
            ranks = self.mesh.group(self.rank, axes=key)
            self._groups[key] = Group(key, ranks, ranks.index(self.rank))
        return self._groups[key]

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Stamp]]:
        """Collect the stamps of the collectives called inside the block."""
        stamps: list[Stamp] = []
        self._recordings.append(stamps)
        try:
            yield stamps
        finally:
            self._recordings = [kept for kept in self._recordings if kept is not stamps]

    def digest(self, axes: Axes) -> int:
        """A 32-bit digest of all collectives called so far along exactly `axes`: equal on all ranks that agree."""
        return self._digests.get(self.group(axes).axes, 0)

    # ---- collectives -------------------------------------------------------------------------------------------

    def broadcast(self, x: Tensor, *, axes: Axes, source: int = 0) -> Work:
        """Overwrite `x` everywhere with the source's `x`."""
        group = self.group(axes)
        if group.size == 1:
            return Work()
        stamp = self._stamp("broadcast", group, x)
        return self._broadcast(stamp, group, x, source)

    def reduce(self, x: Tensor, *, axes: Axes, target: int = 0, op: str = "sum") -> Work:
        """Reduce into the target's `x`; the other ranks' `x` is unspecified afterwards. op: sum, max or min."""
        group = self.group(axes)
        if group.size == 1:
            return Work()
        stamp = self._stamp("reduce", group, x)
        return self._reduce(stamp, group, x, (target, op))

    def all_reduce(self, x: Tensor, *, axes: Axes, op: str = "sum") -> Work:
        """Reduce in place on every rank, bit-identical on all of them. op: sum, max or min."""
        group = self.group(axes)
        if group.size == 1:
            return Work()
        stamp = self._stamp("all_reduce", group, x)
        return self._all_reduce(stamp, group, x, op)

    def all_gather(self, x: Tensor, *, into: Parts, axes: Axes) -> Work:
        """Every rank's `x`, one after the other. `into`: one tensor of size · x.numel() elements, or parts.

        `x` may be the very slice of `into` where it belongs.
        """
        group = self.group(axes)
        if group.size == 1:
            return _copy(x, into)
        stamp = self._stamp("all_gather", group, into)
        return self._all_gather(stamp, group, x, split(into, group.size))

    def reduce_scatter(self, x: Parts, *, into: Tensor, axes: Axes, op: str = "sum") -> Work:
        """Reduce the parts of `x` and keep this rank's. `into` may be the very slice of `x` where it belongs."""
        group = self.group(axes)
        if group.size == 1:
            return _copy(x, into)
        stamp = self._stamp("reduce_scatter", group, x)
        return self._reduce_scatter(stamp, group, split(x, group.size), (into, op))

    def all_to_all(self, x: Parts, *, into: Parts, axes: Axes) -> Work:
        """Part j of this rank's `x` becomes part i of rank j's `into`, i being this rank's index."""
        group = self.group(axes)
        if group.size == 1:
            return _copy(x, into)
        stamp = self._stamp("all_to_all", group, x, sizes_differ=True)
        return self._all_to_all(stamp, group, split(x, group.size), split(into, group.size))

    def gather(self, x: Tensor, *, into: Parts | None, axes: Axes, target: int = 0) -> Work:
        """Every rank's `x` on the target; `into` is None elsewhere."""
        group = self.group(axes)
        if group.size == 1:
            assert into is not None
            return _copy(x, into)
        stamp = self._stamp("gather", group, x, sizes_differ=True)
        return self._gather(stamp, group, x, (None if into is None else split(into, group.size), target))

    def scatter(self, x: Parts | None, *, into: Tensor, axes: Axes, source: int = 0) -> Work:
        """The source's parts, one to each rank; `x` is None elsewhere."""
        group = self.group(axes)
        if group.size == 1:
            assert x is not None
            return _copy(x, into)
        stamp = self._stamp("scatter", group, into, sizes_differ=True)
        return self._scatter(stamp, group, (None if x is None else split(x, group.size), source), into)

    def send(self, x: Tensor, *, axis: str, to: int) -> Work:
        """Send to group index `to` along one axis; messages between two ranks arrive in the order they were sent."""
        group = self.group(axis)
        stamp = self._stamp("send", group, x)
        return self._send(stamp, group, x, to)

    def recv(self, x: Tensor, *, axis: str, source: int) -> Work:
        """Receive into `x` from group index `source` along one axis."""
        group = self.group(axis)
        stamp = self._stamp("recv", group, x)
        return self._recv(stamp, group, x, source)

    def barrier(self, *, axes: Axes | None = None) -> None:
        """Return when every rank of the group (all ranks by default) has called it."""
        group = self.group(self.mesh.names if axes is None else axes)
        if group.size > 1:
            self._barrier(self._stamp("barrier", group, ()), group)

    def exchange(self, value: Any, *, axes: Axes | None = None) -> list[Any]:
        """Every rank's small Python value, in group order (all ranks by default). For reports, not for tensors."""
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

    # ---- what an implementation writes -------------------------------------------------------------------------

    @abc.abstractmethod
    def _broadcast(self, stamp: Stamp, group: Group, x: Tensor, source: int) -> Work: ...

    @abc.abstractmethod
    def _reduce(self, stamp: Stamp, group: Group, x: Tensor, how: tuple[int, str]) -> Work: ...

    @abc.abstractmethod
    def _all_reduce(self, stamp: Stamp, group: Group, x: Tensor, op: str) -> Work: ...

    @abc.abstractmethod
    def _all_gather(self, stamp: Stamp, group: Group, x: Tensor, parts: list[Tensor]) -> Work: ...

    @abc.abstractmethod
    def _reduce_scatter(self, stamp: Stamp, group: Group, parts: list[Tensor], how: tuple[Tensor, str]) -> Work: ...

    @abc.abstractmethod
    def _all_to_all(self, stamp: Stamp, group: Group, parts: list[Tensor], into: list[Tensor]) -> Work: ...

    @abc.abstractmethod
    def _gather(self, stamp: Stamp, group: Group, x: Tensor, how: tuple[list[Tensor] | None, int]) -> Work: ...

    @abc.abstractmethod
    def _scatter(self, stamp: Stamp, group: Group, how: tuple[list[Tensor] | None, int], into: Tensor) -> Work: ...

    @abc.abstractmethod
    def _send(self, stamp: Stamp, group: Group, x: Tensor, to: int) -> Work: ...

    @abc.abstractmethod
    def _recv(self, stamp: Stamp, group: Group, x: Tensor, source: int) -> Work: ...

    @abc.abstractmethod
    def _barrier(self, stamp: Stamp, group: Group) -> None: ...

    # ---- stamps ------------------------------------------------------------------------------------------------

    def _stamp(self, kind: str, group: Group, x: Parts, *, sizes_differ: bool = False) -> Stamp:
        """Give the call its number and keep it. `sizes_differ`: the ranks may rightly disagree about the shape."""
        tensors = [x] if isinstance(x, Tensor) else list(x)
        elements = sum(t.numel() for t in tensors)
        shape = tuple(x.shape) if isinstance(x, Tensor) else (elements,)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else "none"
        size = elements * tensors[0].element_size() if tensors else 0
        stamp = Stamp(self._sequence, kind, group.axes, shape, dtype, size, call_site())
        self._sequence += 1
        if kind not in ("send", "recv"):
            agreed = f"{kind} {'' if sizes_differ else elements} {dtype}"
            self._digests[group.axes] = zlib.crc32(agreed.encode(), self._digests.get(group.axes, 0))
        self.position = Position(stamp)
        for recording in self._recordings:
            recording.append(stamp)
        return stamp


def split(x: Parts, size: int) -> list[Tensor]:
    """`x` as `size` flat parts: equal slices (views) of one contiguous tensor, or the given parts."""
    if isinstance(x, Tensor):
        if x.numel() % size:
            raise ValueError(f"{x.numel()} elements do not divide into {size} equal parts; pass a list of parts")
        return list(x.view(-1).split(x.numel() // size)) if x.numel() else [x.view(-1)] * size
    if len(x) != size:
        raise ValueError(f"{len(x)} parts for a group of {size} ranks")
    return list(x)


def call_site() -> str:
    """`file:line function` of the nearest caller outside this folder."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None:
        return "?"
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}"


def _copy(x: Parts, into: Parts) -> Work:
    """The collective of a group of one."""
    source = x if isinstance(x, Tensor) else x[0]
    target = into if isinstance(into, Tensor) else into[0]
    if source.data_ptr() != target.data_ptr() or source.is_meta:
        target.view(-1).copy_(source.view(-1))
    return Work()

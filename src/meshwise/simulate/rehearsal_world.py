"""Trace world of a rehearsal: it records every call and passes messages between the stages of a pipeline.

One rank of each kind of stage is rehearsed, each on its own thread, because a stage's inputs are decided by the code of
the stage before. Between them small values travel as in a real run; tensors, which have no values, do not. A message
from a stage that is not rehearsed comes from the equal stage that is.
"""

import contextlib
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flat_parts import Parts
from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.api.stopwatch import StepPhase
from meshwise.comm.api.world import Axes, Group, Work
from meshwise.comm.in_process.trace_world import TraceWorld
from meshwise.comm.shared_memory.board import PAYLOAD_BYTES
from meshwise.simulate.operation_recorder import Recorder
from meshwise.simulate.step_tape import Category, TapeCall, TapeWait


class StageMessages:
    """Messages between the threads of the stages.

    One of them runs at a time, until it waits for another: threads that compete for the interpreter would pass it on at
    every operation.
    """

    def __init__(self, rehearsed: Sequence[int]) -> None:
        """`rehearsed`: for each stage's rank, the rank that is rehearsed for it."""
        self.rehearsed = tuple(rehearsed)
        self._turn = threading.Lock()
        self._sent = threading.Condition(self._turn)
        self._barrier = threading.Barrier(len(set(rehearsed)))
        self._values: dict[int, Any] = {}
        self._messages: dict[tuple[int, int], list[Any]] = defaultdict(list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let a stage run in the block; if it fails, the stages that wait for it get threading.BrokenBarrierError."""
        with self._turn:
            try:
                yield
            except BaseException:
                self._barrier.abort()
                self._sent.notify_all()
                raise

    def exchange(self, index: int, *, value: Any) -> list[Any]:
        """Return the value of every stage's rank."""
        self._values[index] = value
        with self._waiting():
            self._barrier.wait()
        values = [self._values[rank] for rank in self.rehearsed]
        with self._waiting():
            self._barrier.wait()
        return values

    def send(self, value: Any, *, source: int, target: int) -> None:
        """Leave a value for another stage's rank."""
        self._messages[source, target - source].append(value)
        self._sent.notify_all()

    def receive(self, number: int, *, source: int, target: int) -> Any:
        """Return the value with this number of those that were left for a stage's rank."""
        messages = self._messages[self.rehearsed[source], target - source]
        while len(messages) <= number and not self._barrier.broken:
            self._sent.wait()
        if len(messages) <= number:
            raise threading.BrokenBarrierError
        return messages[number]

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()


class RehearsalWorld(TraceWorld):
    """World of one rank of a mesh that records its calls."""

    def __init__(
        self, *, rank: int, mesh: Mesh, recorder: Recorder, stages: StageMessages, shared: bool = False
    ) -> None:
        """`shared`: all ranks are processes of one host and share its memory."""
        super().__init__(rank=rank, mesh=mesh, device="meta", flight_recorder=recorder.flight_recorder)
        self._recorder = recorder
        self._stages = stages
        self._shared = shared
        self._received: Counter[int] = Counter()

    @property
    def _in_step(self) -> bool:
        return self.flight_recorder.doing != StepPhase.OUTSIDE

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """Return an empty buffer as any world does; buffers for collectives within a step are gradients."""
        return self._made(numel, dtype=dtype, category=Category.GRADIENTS if self._in_step else None)

    def empty_for_reduce(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an empty buffer as any world does; it is no gradient of a parameter."""
        return self._made(math.prod(shape), dtype=dtype, category=None).view(tuple(shape))

    def _made(self, numel: int, *, dtype: torch.dtype, category: Category | None) -> Tensor:
        """Return a buffer, in shared memory if possible; `category` overrides the category of the rank's activity."""
        if self._shared and self._in_step and numel * dtype.itemsize > PAYLOAD_BYTES:
            return self._recorder.borrow(numel, dtype=dtype, category=category)
        tensor = super().empty(numel, dtype=dtype)
        if category is not None:
            self._recorder.record_allocation(tensor, category=category)
        return tensor

    def shared_empty(self, numel: int, *, dtype: torch.dtype, axes: Axes) -> Tensor | None:
        """Return one piece of memory for all ranks along `axes`, where the ranks share memory."""
        ranks = self.group(axes).size
        if not self._shared or ranks == 1:
            return None
        tensor = super().empty(numel, dtype=dtype)
        self._recorder.share(tensor, ranks=ranks)
        return tensor

    def exchange(self, value: Any, *, axes: Axes | None = None) -> list[Any]:
        """Return every rank's value; a rank that is not rehearsed has the value of the rehearsed one of its stage."""
        group = self.group(self.mesh.names if axes is None else axes)
        if len(self._stages.rehearsed) == 1 or "pp" not in group.axes:
            return [value] * group.size
        values = self._stages.exchange(self.group("pp").index, value=value)
        each = group.size // len(values)  # pp is the outermost axis
        return [one for one in values for _ in range(each)]

    def send_value(self, value: Any, *, axis: str, to: int) -> list[Work]:
        """Send a small Python value to another stage."""
        self._stages.send(value, source=self.group(axis).index, target=to)
        return []

    def recv_value(self, *, axis: str, source: int) -> Any:
        """Return the Python value that another stage sends next."""
        self._received[source] += 1
        return self._stages.receive(self._received[source] - 1, source=source, target=self.group(axis).index)

    def waited(self, record: CallRecord) -> None:
        """Record that this rank waits for a call."""
        self._recorder.record_growth()
        self._recorder.note(TapeWait(record.sequence))

    def _new_record(self, kind: str, group: Group, x: Parts, *, how: str = "") -> CallRecord:
        record = super()._new_record(kind, group, x, how=how)
        if kind == "all_gather" and all(map(self._recorder.is_shared, [x] if isinstance(x, Tensor) else x)):
            record = record._replace(bytes=0)  # everybody sees what is written
        self._recorder.record_growth()
        self._recorder.note(TapeCall(record, group.ranks))
        return record

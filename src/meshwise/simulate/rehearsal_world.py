"""World of a rehearsal: it records every call, and passes Python values between the stages of a pipeline.

One rank of each kind of stage is rehearsed, each on its own thread, because the code of a stage decides the inputs of
the next one. Small Python values (shapes, sizes) travel between the threads as in a real run. Tensors have no values,
so they are not sent. The messages of a stage that is not rehearsed come from the rehearsed stage of its kind."""

import contextlib
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.collective_buffers import Parts
from meshwise.comm.api.flight_recorder import CallRecord, StepPhase
from meshwise.comm.api.world import Axes, Group, Work
from meshwise.comm.in_process.trace_world import TraceWorld
from meshwise.comm.shared_memory.host_connection import PAYLOAD_BYTES
from meshwise.simulate.operation_recorder import Recorder
from meshwise.simulate.step_tape import Category, TapeCall, TapeWait


class StageMessages:
    """Messages between the threads that rehearse the ranks along pp.

    Only one thread runs at a time, until it waits. Otherwise all threads would compete for Python's interpreter lock,
    and switch at every operation. If a thread fails, threads that wait for its messages raise
    threading.BrokenBarrierError."""

    def __init__(self, rehearsed: Sequence[int]) -> None:
        """`rehearsed`: for each rank along pp, the rank that is rehearsed for it."""
        self.rehearsed = tuple(rehearsed)
        self._turn = threading.Lock()
        self._sent = threading.Condition(self._turn)
        self._barrier = threading.Barrier(len(set(rehearsed)))
        self._values: dict[int, Any] = {}
        self._messages: dict[tuple[int, int], list[Any]] = defaultdict(list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Wait for this thread's turn, then run the block. If the block fails, waiting threads fail too."""
        with self._turn:
            try:
                yield
            except BaseException:
                self._barrier.abort()
                self._sent.notify_all()
                raise

    def exchange(self, index: int, *, value: Any) -> list[Any]:
        """Return the values of all ranks along pp, in order. Every rehearsed rank calls it with its own `value`."""
        self._values[index] = value
        with self._waiting():
            self._barrier.wait()
        values = [self._values[rank] for rank in self.rehearsed]
        with self._waiting():
            self._barrier.wait()
        return values

    def send(self, value: Any, *, source: int, target: int) -> None:
        """Store a value for `receive`; `source` and `target` are indices along pp."""
        self._messages[source, target - source].append(value)
        self._sent.notify_all()

    def receive(self, number: int, *, source: int, target: int) -> Any:
        """Wait for the message with this number (from 0) from `source` to `target`, and return its value."""
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
    """World of one rehearsed rank: it records collectives, waits and buffers, and sends no tensor."""

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
        """Return an empty meta buffer for collectives; in a step it counts as gradients."""
        return self._made(numel, dtype=dtype, category=Category.GRADIENTS if self._in_step else None)

    def empty_for_reduce(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an empty meta buffer for a reduction; it counts under the rank's current activity."""
        return self._made(math.prod(shape), dtype=dtype, category=None).view(tuple(shape))

    def _made(self, numel: int, *, dtype: torch.dtype, category: Category | None) -> Tensor:
        """Return a buffer; in a step, large ones are in shared memory. `category`: None for the activity's category."""
        if self._shared and self._in_step and numel * dtype.itemsize > PAYLOAD_BYTES:
            return self._recorder.borrow(numel, dtype=dtype, category=category)
        tensor = super().empty(numel, dtype=dtype)
        if category is not None:
            self._recorder.record_allocation(tensor, category=category)
        return tensor

    def shared_empty(self, numel: int, *, dtype: torch.dtype, axes: Axes) -> Tensor | None:
        """Return a buffer that all ranks along `axes` share, or None if they share no memory or are one rank."""
        ranks = self.group(axes).size
        if not self._shared or ranks == 1:
            return None
        tensor = super().empty(numel, dtype=dtype)
        self._recorder.share(tensor, ranks=ranks)
        return tensor

    def exchange(self, value: Any, *, axes: Axes | None = None) -> list[Any]:
        """Return the values of all ranks along `axes` (None: all axes); ranks of one kind have the same value."""
        group = self.group(self.mesh.names if axes is None else axes)
        if len(self._stages.rehearsed) == 1 or "pp" not in group.axes:
            return [value] * group.size
        values = self._stages.exchange(self.group("pp").index, value=value)
        each = group.size // len(values)  # pp is the outermost axis
        return [one for one in values for _ in range(each)]

    def send_value(self, value: Any, *, axis: str, to: int) -> list[Work]:
        """Send a small Python value to the rank with index `to` along pp; the list of works is empty."""
        self._stages.send(value, source=self.group(axis).index, target=to)
        return []

    def recv_value(self, *, axis: str, source: int) -> Any:
        """Wait for the next Python value from the rank with index `source` along pp, and return it."""
        self._received[source] += 1
        return self._stages.receive(self._received[source] - 1, source=source, target=self.group(axis).index)

    def waited(self, record: CallRecord) -> None:
        """Record that this rank waits for a collective to end."""
        self._recorder.record_growth()
        self._recorder.note(TapeWait(record.sequence))

    def _new_record(self, kind: str, group: Group, x: Parts, *, how: str = "") -> CallRecord:
        record = super()._new_record(kind, group, x, how=how)
        if kind == "all_gather" and all(map(self._recorder.is_shared, [x] if isinstance(x, Tensor) else x)):
            record = record._replace(bytes=0)  # ranks read shared memory, so nothing moves
        self._recorder.record_growth()
        self._recorder.note(TapeCall(record, group.ranks))
        return record

"""Streams, events and pinned memory of a simulated device, as the `Streams` of a world (`SimulatedStreams`).

They differ from plain `Streams` where a GPU differs from the CPU. Work of a stream runs later than its call
(`queued_work.py`). Each use of memory is checked for races (`stream_races.py`). A pool gives its 32 streams again and
again. `with use(stream) as value` gives None. The current device of a new thread is number 0."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor

from accelerator.queued_work import QueuedWork, WorkQueues, place_of_call
from accelerator.stream_races import Clock, Memory, RaceDetector, label
from meshwise.comm.api.streams import Stream, Streams
from meshwise.model.torch_private import without_dispatch_modes

POOL = 32
"""Number of streams in a pool: then the pool gives its streams again, to communicators too."""


class SimulatedStream:
    """Stream of a simulated device; number 0 is the default stream, which runs its operations when they are called."""

    def __init__(self, streams: "SimulatedStreams", *, number: int, name: str) -> None:
        self.streams = streams
        self.number = number
        self.name = name
        self.last: QueuedWork | None = None
        self._waits: list[QueuedWork] = []

    @property
    def queued(self) -> list[QueuedWork]:
        """Works that later work of this stream runs after."""
        return [work for work in (*self._waits, self.last) if work is not None and not work.done]

    def wait_stream(self, stream: "SimulatedStream", /) -> None:
        """Let later work of this stream wait for the work queued so far on `stream`."""
        self.wait_works(stream.queued, clock=stream.streams.races.clock(stream.name))

    def wait_event(self, event: "SimulatedEvent", /) -> None:
        """Let later work of this stream wait for `event`; do nothing if it was never recorded."""
        self.wait_works(event.works, clock=event.clock)

    def synchronize(self) -> None:
        """Block the host until all work of the stream is done."""
        self.streams.host_waits(self.queued, clock=self.streams.races.clock(self.name))

    def put(self, run: Callable[[], None], *, text: str, defers: bool) -> None:
        """Run an operation now, after what it waits for, or with `defers` queue it."""
        if defers:
            self.append(QueuedWork(run, after=self.queued, text=text))
            return
        self.streams.queues.force(self.queued, rank=self.streams.rank)
        self._waits = []
        run()

    def append(self, work: QueuedWork) -> None:
        """Queue a work that was made to run after `queued`."""
        self.last, self._waits = work, []
        self.streams.queues.post(work, rank=self.streams.rank)

    def wait_works(self, works: Sequence[QueuedWork], *, clock: Clock) -> None:
        """Let later work of this stream wait for `works`, after which all in `clock` is over."""
        if self.number == 0:
            self.streams.queues.force(works, rank=self.streams.rank)
        else:
            self._waits = [*self._waits, *works]
        self.streams.races.wait(self.name, clock=clock)


class SimulatedEvent:
    """Event of a simulated device."""

    def __init__(self, streams: "SimulatedStreams") -> None:
        self._streams = streams
        self.works: Sequence[QueuedWork] = ()
        self.clock: Clock = {}
        self._seconds = 0.0

    def record(self, stream: SimulatedStream | None = None, /) -> None:
        """Place the event after all work queued on `stream`, by default on the thread's current stream.

        Raises RuntimeError for a stream of another device."""
        stream = stream or self._streams.host.current_of_thread()
        if stream.streams is not self._streams:
            raise RuntimeError(
                f"an event of device {self._streams.device} is recorded on a stream of {stream.streams.device}, the "
                "current device of the thread; call `select()` first"
            )
        self.works, self.clock = stream.queued, self._streams.races.clock(stream.name)
        self._seconds = time.monotonic()

    def synchronize(self) -> None:
        """Block the host until the work before the event is done; return at once if the event was never recorded."""
        self._streams.host_waits(self.works, clock=self.clock)

    def query(self) -> bool:
        """Return whether the work before the event is done."""
        return all(work.done for work in self.works)

    def elapsed_time(self, end: "SimulatedEvent", /) -> float:
        """Return the milliseconds of the host between the recordings of this event and `end`."""
        return (end._seconds - self._seconds) * 1e3


Modes: TypeAlias = Callable[["SimulatedStreams"], AbstractContextManager[None]]
"""Function that returns a context in which the tensors of this thread may lie on a device."""


class SimulatedHost:
    """All simulated devices of a run, and the current device of each thread: number 0 until the thread selects one."""

    def __init__(self, queues: WorkQueues) -> None:
        self.queues = queues
        self.devices: list[SimulatedStreams] = []
        self._thread = threading.local()

    def device_of_thread(self) -> int:
        """Return the number of this thread's current device."""
        return int(getattr(self._thread, "device", 0))

    def select(self, device: int) -> None:
        """Make a device the current one of this thread."""
        self._thread.device = device

    def current_of_thread(self) -> SimulatedStream:
        """Return the current stream of this thread's current device."""
        return self.devices[self.device_of_thread()].current()


class SimulatedStreams(Streams):
    """Streams of one simulated device; the `Streams` that a `World` on it uses."""

    def __init__(self, host: SimulatedHost, *, rank: int, watches: bool, waits_at_launch: bool, modes: "Modes") -> None:
        """`rank`: rank that computes on the device, and number of the device. `watches`: report races.
        `waits_at_launch`: see `before_launch`. `modes`: lets the tensors of a thread lie on the device."""
        self.host = host
        self.queues = host.queues
        self.rank = rank
        self.device = torch.device("cuda", rank)
        self.races = RaceDetector(watches=watches)
        self._waits_at_launch = waits_at_launch
        self._modes = modes
        self._pools = {
            urgent: [
                SimulatedStream(self, number=1 + at, name=f"stream {at}{' (urgent)' * urgent}") for at in range(POOL)
            ]
            for urgent in (False, True)
        }
        self._next = {False: 0, True: 0}
        self._default = SimulatedStream(self, number=0, name="the default stream")
        self._thread = threading.local()
        self._generator = torch.Generator().manual_seed(rank)
        self.waits: list[str] = []
        """Place of each call for which the thread of the rank has waited for the device."""

    def create(self, *, urgent: bool = False) -> SimulatedStream:
        """Return the next stream of a pool."""
        self._next[urgent] += 1
        return self._pools[urgent][(self._next[urgent] - 1) % POOL]

    def current(self) -> SimulatedStream:
        """Return the current stream of this thread."""
        stream: SimulatedStream = getattr(self._thread, "stream", self._default)
        return stream

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Make `stream` this thread's current stream, and the device its current one, inside the block."""
        before = self.current()
        with self._guard():
            self._thread.stream = stream
            try:
                yield
            finally:
                self._thread.stream = before

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Make the device this thread's current one inside the block."""
        before = self.host.device_of_thread()
        self.host.select(self.rank)
        try:
            with self.modes():
                yield
        finally:
            self.host.select(before)

    def select(self) -> None:
        """Make the device this thread's current one."""
        self.host.select(self.rank)

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Let this thread's tensors lie on the device inside the block, unless they do already."""
        if getattr(self._thread, "inside", False):
            yield
            return
        self._thread.inside = True
        try:
            with self._modes(self):
                yield
        finally:
            self._thread.inside = False

    def event(self, *, timing: bool = False, blocking: bool = False) -> SimulatedEvent:  # noqa: ARG002 - all alike
        """Return an event that is not recorded yet."""
        return SimulatedEvent(self)

    def keep(self, tensor: Tensor, *, stream: Stream) -> None:
        """Keep the freed memory of `tensor` from reuse until the work queued so far on `stream` is done."""
        assert isinstance(stream, SimulatedStream)
        if (memory := self.races.memory_of(tensor)) is not None:
            memory.kept_for.add(stream.name)

    def resize(self, tensor: Tensor, *, size: int) -> None:
        """Let the storage of `tensor` have `size` bytes of NaN. Raises StreamRace if a stream may use freed bytes."""
        memory = self.races.memory_of(tensor)
        if memory is not None:
            if size == 0 and (race := self.races.race_of_free(memory)) is not None:
                self.races.report(race)
            works = [work for stream in self._streams for work in stream.queued]
            if size == 0 and works:  # the queued work finds what another tensor has left there
                with hidden():
                    poison(tensor)
                    self.queues.force(works, rank=self.rank)
            memory.uses.clear()
            memory.kept_for.clear()
            memory.owner = self.current().name
        tensor.untyped_storage().resize_(size)
        if size:
            with hidden():
                poison(tensor)

    def synchronize(self) -> None:
        """Block the host until all work of the device is done."""
        for stream in self._streams:
            stream.synchronize()

    def host_empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in pinned memory of the host."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        with hidden():
            poison(tensor)
        self.races.add(tensor, memory=Memory(None, pinned=True, label=f"pinned memory of {place_of_call()}"))
        return tensor

    def generator(self) -> torch.Generator:
        """Return the random generator of the device."""
        return self._generator

    def before_launch(self) -> None:
        """Block the host until all work of the device is done, if it waits at launches. For the race detector this is
        no wait: it need not happen."""
        if self._waits_at_launch:
            self.queues.force([work for stream in self._streams for work in stream.queued], rank=self.rank)

    def host_waits(self, works: Sequence[QueuedWork], *, clock: Clock) -> None:
        """Block the host until works of the device are done."""
        if self.queues.is_thread_of(self.rank):
            self.waits.append(place_of_call())
        self.queues.force(works, rank=self.rank)
        self.races.host_waits(clock)

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of the device on which a tensor lies; None for the host."""
        memory = self.races.memory_of(tensor)
        return None if memory is None else memory.device

    def place(self, tensor: Tensor, *, number: int) -> bool:
        """Let a new tensor lie on device `number`, in memory of the current stream; return False if it lies on one."""
        if tensor.is_meta or self.number_of(tensor) is not None:
            return False
        where = f"{label(tensor)} allocated at {place_of_call()}"
        self.races.add(tensor, memory=Memory(number, owner=self.current().name, label=where))
        return True

    @property
    def _streams(self) -> list[SimulatedStream]:
        """Streams that the program may have: the default one, and those that a pool has given."""
        return [self._default, *(one for urgent, pool in self._pools.items() for one in pool[: self._next[urgent]])]


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hide operations inside the block from all modes and from autograd."""
    with without_dispatch_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def poison(tensor: Tensor) -> None:
    """Fill a floating tensor with NaN, and leave any other one as it is."""
    if tensor.is_floating_point():
        tensor.detach().fill_(float("nan"))
    elif tensor.dtype == torch.uint8:
        tensor.detach().fill_(0xFF)

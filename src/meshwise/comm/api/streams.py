"""Streams, events, pinned memory, generators and memory figures of devices: the only file that uses `torch.cuda`.

`streams_of(device)` returns the `Streams` of a device. `CudaStreams` are torch's. `HostStreams`, of every other device,
run each operation at once: there is one stream, and nothing to wait for. So callers need no branch by device.

`gpu_count`, `gpu_properties`, `cuda_in_use` and `nccl_version` describe the machine. `generator_states` and
`restore_generators` save and restore torch's random generators.
"""

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class StreamEvent(Protocol):
    """A point in the work of a stream."""

    def record(self, stream: Any = None, /) -> None:
        """Place the event after all work given so far to `stream`, by default to the current one."""

    def synchronize(self) -> None:
        """Block the host until the work before the event is done; an event never recorded blocks nothing."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds from this event to `end`; both were made with `timing`."""


class Stream(Protocol):
    """A queue of work of a device: its operations run in order, while other streams run theirs."""

    def wait_stream(self, stream: Any, /) -> None:
        """Let later work of this stream wait for the work given so far to `stream`."""

    def wait_event(self, event: Any, /) -> None:
        """Let later work of this stream wait for `event`."""

    def synchronize(self) -> None:
        """Block the host until all work of the stream is done."""


@dataclass(frozen=True)
class TimeOrigin:
    """An event, and its time in seconds by `time.monotonic`."""

    event: StreamEvent
    seconds: float

    def at(self, event: StreamEvent) -> float:
        """Return the time of an event by `time.monotonic`; block the host until the event has happened."""
        event.synchronize()
        return self.seconds + self.event.elapsed_time(event) / 1e3


class DeviceMemory(Protocol):
    """Memory of a GPU in bytes, as torch's allocator of this process and the driver count it."""

    @property
    def held(self) -> int:
        """Bytes of all tensors of this process."""

    @property
    def peak(self) -> int:
        """Largest `held` since the process began, or since `forget_peak`."""

    @property
    def total(self) -> int:
        """Bytes of the device."""

    def forget_peak(self) -> None:
        """Let `peak` begin anew."""

    def free(self) -> int:
        """Return the bytes that no process uses; first release the blocks that torch keeps for reuse."""


class Streams(Protocol):
    """Streams of one device, and what copies between it and the host need."""

    device: torch.device

    @property
    def memory(self) -> DeviceMemory | None:
        """Memory of a GPU; None for other devices, whose memory the system counts."""

    def create(self) -> Stream:
        """Return a new stream."""

    def current(self) -> Stream:
        """Return the stream that this thread gives its work to."""

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Give the work of the block to `stream`. The value of the context manager means nothing."""

    def guard(self) -> AbstractContextManager[Any]:
        """Make the device this thread's current one inside the block."""

    def select(self) -> None:
        """Make the device this thread's current one."""

    def event(self, *, timing: bool = False, blocking: bool = False) -> StreamEvent:
        """Return an event that is not recorded yet.

        timing      it can tell the time between it and another one
        blocking    a host thread that waits for it sleeps, instead of polling
        """

    def mark(self, *, timing: bool = False, blocking: bool = False) -> StreamEvent:
        """Return an event recorded on the current stream."""

    def origin(self) -> TimeOrigin:
        """Return an origin that gives the times of events with `timing` by the host's clock. Synchronize first."""

    def keep(self, tensor: Tensor, *, stream: Stream) -> None:
        """Reuse the memory of `tensor` only after the work given so far to `stream`, which uses it, is done."""

    def synchronize(self) -> None:
        """Block the host until all work of the device is done."""

    def host_empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised CPU tensor for asynchronous copies to and from the device: pinned for CUDA."""

    def generator(self) -> torch.Generator:
        """Return torch's default random generator of the device."""


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device: torch's for CUDA, no-ops for any other."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams(device)


# ---- CUDA --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaMemory:
    """Memory of a CUDA device."""

    device: torch.device

    @property
    def held(self) -> int:
        """Bytes of all tensors of this process."""
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak(self) -> int:
        """Largest `held` since the process began, or since `forget_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    @property
    def total(self) -> int:
        """Bytes of the device."""
        return int(gpu_properties(self.device).total_memory)

    def forget_peak(self) -> None:
        """Let `peak` begin anew."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def free(self) -> int:
        """Return the bytes that no process uses; first release the blocks that torch keeps for reuse."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


class CudaStreams:
    """Streams of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def memory(self) -> CudaMemory:
        """Memory of the device."""
        return CudaMemory(self.device)

    def create(self) -> Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self.device)

    def current(self) -> Stream:
        """Return the stream that this thread gives its work to."""
        return torch.cuda.current_stream(self.device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Give the work of the block to `stream`."""
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def guard(self) -> AbstractContextManager[Any]:
        """Make the device this thread's current one inside the block."""
        return torch.cuda.device(self.device)

    def select(self) -> None:
        """Make the device this thread's current one."""
        torch.cuda.set_device(self.device)

    def event(self, *, timing: bool = False, blocking: bool = False) -> StreamEvent:
        """Return an event that is not recorded yet."""
        return torch.cuda.Event(enable_timing=timing, blocking=blocking)

    def mark(self, *, timing: bool = False, blocking: bool = False) -> StreamEvent:
        """Return an event recorded on the current stream."""
        event = self.event(timing=timing, blocking=blocking)
        event.record(self.current())
        return event

    def origin(self) -> TimeOrigin:
        """Return an origin that gives the times of events with `timing` by the host's clock. Synchronize first."""
        self.synchronize()
        seconds = time.monotonic()
        return TimeOrigin(self.mark(timing=True), seconds)

    def keep(self, tensor: Tensor, *, stream: Stream) -> None:
        """Reuse the memory of `tensor` only after the work given so far to `stream` is done."""
        assert isinstance(stream, torch.cuda.Stream)
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Block the host until all work of the device is done."""
        torch.cuda.synchronize(self.device)

    def host_empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in pinned memory of the host."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def generator(self) -> torch.Generator:
        """Return torch's default random generator of the device."""
        torch.cuda.init()
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return torch.cuda.default_generators[index]


# ---- other devices -----------------------------------------------------------------------------------------------


class HostEvent:
    """A point in the work of a device that runs every operation at once: a time of the host."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def record(self, stream: Any = None, /) -> None:  # noqa: ARG002 - there is one
        """Place the event at the present time; `stream` is ignored."""
        self._seconds = time.monotonic()

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end: "HostEvent", /) -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1e3


@dataclass(frozen=True)
class HostStream:
    """The one stream of a device that runs every operation at once; all are equal."""

    def wait_stream(self, stream: Any, /) -> None:
        """Do nothing: the work of every stream is done."""

    def wait_event(self, event: Any, /) -> None:
        """Do nothing: the event has happened."""

    def synchronize(self) -> None:
        """Return at once."""


class HostStreams:
    """Streams of a device that runs every operation at once: a CPU, or torch's meta device."""

    memory = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def create(self) -> HostStream:
        """Return the stream."""
        return HostStream()

    def current(self) -> HostStream:
        """Return the stream."""
        return HostStream()

    def use(self, stream: Stream) -> AbstractContextManager[Any]:  # noqa: ARG002 - there is one
        """Do nothing inside the block."""
        return contextlib.nullcontext()

    def guard(self) -> AbstractContextManager[Any]:
        """Do nothing inside the block."""
        return contextlib.nullcontext()

    def select(self) -> None:
        """Do nothing: a thread computes on any such device."""

    def event(self, *, timing: bool = False, blocking: bool = False) -> HostEvent:  # noqa: ARG002 - the same for all
        """Return an event that is not recorded yet."""
        return HostEvent()

    def mark(self, *, timing: bool = False, blocking: bool = False) -> HostEvent:  # noqa: ARG002 - the same for all
        """Return an event at the present time."""
        return HostEvent(time.monotonic())

    def origin(self) -> TimeOrigin:
        """Return an origin that gives the times of events by the host's clock."""
        seconds = time.monotonic()
        return TimeOrigin(HostEvent(seconds), seconds)

    def keep(self, tensor: Tensor, *, stream: Stream) -> None:
        """Do nothing: no work of a stream is left."""

    def synchronize(self) -> None:
        """Return at once."""

    def host_empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised CPU tensor."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def generator(self) -> torch.Generator:
        """Return torch's default random generator of the CPU."""
        return torch.default_generator


# ---- the machine, and torch's generators -------------------------------------------------------------------------


def gpu_count() -> int:
    """Return how many GPUs torch can use here; 0 without a working driver."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_properties(device: torch.device | int) -> Any:
    """Return torch's properties of a GPU: `name`, `total_memory` in bytes, `major`, `minor`, `uuid`."""
    return torch.cuda.get_device_properties(device)


def cuda_in_use() -> bool:
    """Return True if this process has initialised CUDA; a fork of it cannot use a GPU."""
    return bool(torch.cuda.is_initialized())


def nccl_version() -> str:
    """Return the version of NCCL as `2.27.5`. Raises AttributeError when torch was built without it."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def generator_states() -> list[Tensor]:
    """Return the states of torch's default generators: the CPU's, and the current GPU's if CUDA is in use."""
    return [generator.get_state() for generator in _generators()]


def restore_generators(states: Sequence[Tensor]) -> None:
    """Set torch's default generators to `states`, which `generator_states` returned; none for an empty list."""
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


def _generators() -> list[torch.Generator]:
    on_gpu = [CudaStreams(torch.device("cuda")).generator()] if cuda_in_use() else []
    return [torch.default_generator, *on_gpu]

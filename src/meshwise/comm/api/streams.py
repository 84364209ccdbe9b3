"""Streams, events, pinned memory, generators and memory figures of devices: the only file that uses `torch.cuda`.

`streams_of(device)` returns the `Streams` of a device, so callers need no branch by device. `CudaStreams` wraps torch's
CUDA streams. On every other device each operation is complete when its call returns, so waiting does nothing.

`gpu_count`, `gpu_properties`, `cuda_in_use` and `nccl_version` describe the machine and this process.
`use_deterministic_kernels` limits the kernels that torch uses in this process.
`generator_states` and `restore_generators` save and restore torch's random generators."""

import contextlib
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

StreamEvent: TypeAlias = Any
"""A point in the work of a stream: a `HostEvent`, or an event of torch, which has the same methods."""

Stream: TypeAlias = Any
"""Queue of a device's operations: a `HostStream`, or a stream of torch, which has the same methods.

The operations run in order, at the same time as the operations of other streams."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a GPU in bytes, as counted by torch's allocator (`held`, `peak`) and the driver (`total`, `free`)."""

    device: torch.device

    @property
    def held(self) -> int:
        """Bytes of all tensors of this process on the GPU."""
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak(self) -> int:
        """Largest `held` since the process began, or since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    @property
    def total(self) -> int:
        """Bytes of the GPU's memory."""
        return int(gpu_properties(self.device).total_memory)

    def reset_peak(self) -> None:
        """Reset `peak` to the present `held`."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def free(self) -> int:
        """Return the bytes that no process uses, after `torch.cuda.empty_cache`."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


class HostEvent:
    """Event of a device whose operations are complete when their calls return: a time of the host's clock."""

    _seconds = 0.0

    def record(self, stream: Any = None, /) -> None:  # noqa: ARG002 - the device has one stream
        """Place the event after all work queued so far on `stream`, which is the present time."""
        self._seconds = time.monotonic()

    def synchronize(self) -> None:
        """Return at once: the work before the event is done."""

    def query(self) -> bool:
        """Return whether the work before the event is done, without blocking: True."""
        return True

    def elapsed_time(self, end: "HostEvent", /) -> float:
        """Return the milliseconds from this event to the event `end`; both must be made with `timing=True`."""
        return (end._seconds - self._seconds) * 1e3


@dataclass(frozen=True)
class HostStream:
    """The only stream of a device whose operations are complete when their calls return; all instances are equal."""

    def wait_stream(self, stream: Any, /) -> None:
        """Let later work of this stream wait for the work queued so far on `stream`, which is done."""

    def wait_event(self, event: Any, /) -> None:
        """Let later work of this stream wait for `event`, which has happened."""

    def synchronize(self) -> None:
        """Return at once."""


class Streams:
    """Operations of one device: make and use streams and events, allocate pinned memory, read memory figures.

    The methods here are for a CPU and torch's meta device, whose operations are complete when their calls return. So
    there is one stream, and waiting does nothing. `CudaStreams` overrides them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def memory(self) -> DeviceMemory | None:
        """Memory figures of a GPU; None for other devices."""
        return None

    def create(self) -> Stream:
        """Return a stream of the device's pool of 32; further calls return the same streams again."""
        return HostStream()

    def current(self) -> Stream:
        """Return the current stream of this thread."""
        return HostStream()

    def use(self, stream: Stream) -> AbstractContextManager[Any]:  # noqa: ARG002 - the device has one stream
        """Make `stream` this thread's current stream inside the block. The value of the context manager is unused."""
        return contextlib.nullcontext()

    def select(self) -> None:
        """Make the device this thread's current one."""

    def event(self, *, timing: bool = False, blocking: bool = False) -> StreamEvent:  # noqa: ARG002 - the same for all
        """Return an event that is not recorded yet. timing: True for an event that `elapsed_time` can use. blocking:
        True if a host thread that waits for the event sleeps, False if the thread polls."""
        return HostEvent()

    def mark(self, *, timing: bool = False, blocking: bool = False) -> StreamEvent:
        """Return an event recorded on the current stream; parameters as of `event`."""
        event = self.event(timing=timing, blocking=blocking)
        event.record(self.current())
        return event

    def keep(self, tensor: Tensor, *, stream: Stream) -> None:
        """Declare that `stream` uses `tensor`. When the tensor is freed, its memory is not reused before all work that
        is then queued on `stream` is done."""

    def copy_on(self, stream: Stream, *, values: Tensor, into: Tensor) -> StreamEvent:
        """Copy `values` into `into` on `stream`, after the work that is queued on the current stream. Return an event
        at the end of the copy, without waiting for it."""
        stream.wait_stream(self.current())
        with self.use(stream):
            into.copy_(values, non_blocking=True)
            copied = self.mark()
        self.keep(values, stream=stream)
        return copied

    def resize(self, tensor: Tensor, *, size: int) -> None:
        """Resize the storage of `tensor` to `size` bytes, with unspecified values. Size 0 frees the memory: later work
        of the stream on which it was allocated may use it."""
        tensor.untyped_storage().resize_(size)

    def synchronize(self) -> None:
        """Block the host until all work of the device is done."""

    def host_empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized CPU tensor for asynchronous copies to and from the device: pinned for CUDA."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def generator(self) -> torch.Generator:
        """Return torch's default random generator of the device; of the CPU for the meta device."""
        return torch.default_generator


class CudaStreams(Streams):
    """torch's streams, events and memory of one CUDA device."""

    @property
    def memory(self) -> DeviceMemory:
        """Memory figures of the device."""
        return DeviceMemory(self.device)

    def create(self) -> Stream:
        """Return a stream of torch's pool of 32."""
        return torch.cuda.Stream(self.device)

    def current(self) -> Stream:
        """Return the current stream of this thread."""
        return torch.cuda.current_stream(self.device)

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make `stream` this thread's current stream inside the block."""
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def select(self) -> None:
        """Make the device this thread's current one."""
        torch.cuda.set_device(self.device)

    def event(self, *, timing: bool = False, blocking: bool = False) -> StreamEvent:
        """Return an event that is not recorded yet."""
        return torch.cuda.Event(enable_timing=timing, blocking=blocking)

    def keep(self, tensor: Tensor, *, stream: Stream) -> None:
        """Declare that `stream` uses `tensor`, by `torch.Tensor.record_stream`."""
        assert isinstance(stream, torch.cuda.Stream)
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Block the host until all work of the device is done."""
        torch.cuda.synchronize(self.device)

    def host_empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor in pinned memory of the host."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def generator(self) -> torch.Generator:
        """Return torch's default random generator of the device."""
        torch.cuda.init()
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        return torch.cuda.default_generators[index]


def streams_of(device: torch.device) -> Streams:
    """Return the `Streams` of a device: `CudaStreams` for CUDA, `Streams` itself for any other device."""
    return CudaStreams(device) if device.type == "cuda" else Streams(device)


# ---- the machine, and torch's generators -------------------------------------------------------------------------


def gpu_count() -> int:
    """Return the number of GPUs that torch can use in this process; 0 without a working driver."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_properties(device: torch.device | int) -> Any:
    """Return torch's properties of a GPU: `name`, `total_memory` in bytes, `major`, `minor`, `uuid`."""
    return torch.cuda.get_device_properties(device)


def cuda_in_use() -> bool:
    """Return True if this process has initialized CUDA; then its forks cannot use a GPU."""
    return bool(torch.cuda.is_initialized())


def use_deterministic_kernels(device: torch.device) -> None:
    """Make torch use only deterministic kernels in this process; an operation without such a kernel then raises. Do
    nothing for the meta device. For CUDA, also set CUBLAS_WORKSPACE_CONFIG unless it is set: matrix products before
    this call may already have used another value."""
    if device.type != "meta":
        torch.use_deterministic_algorithms(mode=True)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def nccl_version() -> str:
    """Return the version of NCCL as `2.27.5`. Raises AttributeError when torch was built without NCCL."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def generator_states() -> list[Tensor]:
    """Return the states of torch's default generators: first the CPU's, then the current GPU's if CUDA is in use."""
    return [generator.get_state() for generator in _generators()]


def seed_generators(seed: int) -> None:
    """Seed torch's default generators of the CPU and, if CUDA is in use, of the current GPU."""
    for generator in _generators():
        generator.manual_seed(seed)


def restore_generators(states: Sequence[Tensor]) -> None:
    """Set torch's default generators to `states`, a result of `generator_states`; do nothing for an empty list."""
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


def _generators() -> list[torch.Generator]:
    on_gpu = [streams_of(torch.device("cuda")).generator()] if cuda_in_use() else []
    return [torch.default_generator, *on_gpu]

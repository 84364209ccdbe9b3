"""Keep parameters, masters and gradients on their tiers, and move them to the device and back.

    | tier      on a GPU                                     on a CPU
    | device    the GPU's memory                             its memory
    | cpu       pinned memory of the host; copies on a       its memory: there is nothing to move
    |           stream of their own
    | disk      a file of the rank; staging buffers (pinned when there is a GPU) on the way

A tensor on any tier may be read and filled like any other; `bring` and `store` are the fast ways. With nothing
offloaded a `Tiers` does nothing.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from meshwise.comm.api.streams import streams_of
from meshwise.memory.rehearsed_movers import RehearsedFile
from meshwise.memory.staging_buffers import StagingBuffers, SwapConfig
from meshwise.memory.swap_file import BLOCK, REMEMBERED, MovedChunk, SwapFile, SwapTransfer, whole_blocks
from meshwise.plan.plan_keys import Offload

GATHERED_AHEAD = 3
"""Staging buffers for parameters: those in use, the next, and the one after."""


class BorrowedTensor:
    """A tensor of another tier, on the device for the time of its use."""

    def __init__(
        self, values: Tensor, *, ready: Callable[[], None] | None = None, release: Callable[[], None] | None = None
    ) -> None:
        """`ready` returns when the values have arrived; `release` frees what they lie in."""
        self._values = values
        self._ready = ready
        self._release = release

    def wait(self) -> Tensor:
        """Wait for the values and return them. Raises TierError when they do not come."""
        if self._ready is not None:
            self._ready()
        return self._values

    def release(self) -> None:
        """Give the memory back; a second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Tiers:
    """The tiers of one rank. Raises TierError when the plan says disk and there is none."""

    def __init__(
        self, offload: Offload | None = None, *, device: torch.device | None = None, swap: SwapConfig | None = None
    ) -> None:
        self.offload = offload or Offload()
        self.device = device or torch.device("cpu")
        self.swap = swap or SwapConfig()
        self._updates_on_cpu = self.offload.updates_on_cpu
        self.file: SwapFile | RehearsedFile | None = None
        if self.offload.uses_disk:
            self.file = RehearsedFile() if self.device.type == "meta" else SwapFile(self.swap.folder)
        self.on_new_buffer: Callable[[Tensor], None] = lambda _: None
        """Receives each staging buffer when it is made, on its first use."""
        self.disk_bytes: Counter[str] = Counter()
        """Bytes on disk, by what they are."""
        self._largest = 0
        self._round = BLOCK
        self._buffers: list[StagingBuffers] = []
        self._stored: list[SwapTransfer] = []
        self._updates: deque[MovedChunk] = deque(maxlen=REMEMBERED)
        self._streams = streams_of(self.device)
        self._copies = self._streams.create() if self._on_gpu and self.offload != Offload() else None

    @property
    def updates_on(self) -> torch.device:
        """Device on which the optimizer runs."""
        return torch.device("cpu") if self._updates_on_cpu and self._on_gpu else self.device

    @property
    def chunk_limit(self) -> int | None:
        """Most elements of a chunk that is updated at once, in whole blocks of any dtype; None: no limit.

        Four tensors of fp32 then fit a staging buffer: the master, its gradient and two of the optimizer's.
        """
        return max(BLOCK, self.swap.buffer // 16 // BLOCK * BLOCK) if self._moves else None

    @cached_property
    def staging(self) -> StagingBuffers:
        """The buffers of the update."""
        is_rehearsal = isinstance(self.file, RehearsedFile)
        return self._new_buffers(count=self.swap.buffers, size=self._round, is_disk_slow=is_rehearsal)

    @cached_property
    def _gathered(self) -> StagingBuffers:
        """The buffers of parameters on their way to a gather."""
        return self._new_buffers(count=GATHERED_AHEAD, size=self._largest)

    def _new_buffers(self, **options: Any) -> StagingBuffers:
        buffers = StagingBuffers(device=self.device, on_new_buffer=self.on_new_buffer, **options)
        self._buffers.append(buffers)
        return buffers

    def reserve(self, size: int) -> None:
        """Make the staging buffers of the update, when they are made, at least `size` bytes large."""
        self._round = max(self._round, size)

    @property
    def staged(self) -> int:
        """Bytes of all staging buffers that were made."""
        return sum(one.bytes for one in self._buffers)

    # ---- storage -----------------------------------------------------------------------------------------------

    def is_offloaded(self, what: str) -> bool:
        """Return whether `what` (`params`, `masters`, …) has another tier than the one it is used on."""
        tier = getattr(self.offload, what)
        return tier == "disk" or (tier == "cpu" and self._on_gpu)

    def empty(self, what: str, *, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor in one dim on the tier of `what`: `params`, `masters`, `gradients` or `optimizer`.

        Its contents are unspecified. Raises TierError when the disk has no room.
        """
        if getattr(self.offload, what) == "disk":
            assert self.file is not None
            self.disk_bytes[what] += numel * dtype.itemsize
            if what in ("params", "gradients"):
                self._largest = max(self._largest, numel * dtype.itemsize)
            return self.file.allocate(numel, dtype=dtype)
        return self._streams.host_empty([numel], dtype=dtype)

    def bytes(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
        """Return the bytes of tensors by what they are, with their tier unless on the device: `disk/optimizer`."""
        total: Counter[str] = Counter()
        for what, tensor in tensors:
            away = "" if tensor.device.type == self.device.type else "cpu/"
            total[f"{'disk/' if self.on_disk(tensor) else away}{what}"] += tensor.nbytes
        return dict(total)

    @property
    def disk_tensors(self) -> Sequence[Tensor]:
        """Tensors on disk in a rehearsal."""
        return self.file.tensors if isinstance(self.file, RehearsedFile) else ()

    def on_disk(self, tensor: Tensor) -> bool:
        """Return whether a tensor is stored on disk."""
        return self.file is not None and self.file.locate(tensor) is not None

    @property
    def moved(self) -> list[MovedChunk]:
        """The reads and writes of the last steps, and their updates on the CPU."""
        return [*(() if self.file is None else self.file.moved), *self._updates]

    def record_update(self, size: int, *, since: float) -> None:
        """Record an update of `size` bytes that began at `since`, a time of `time.monotonic`."""
        if self._updates_on_cpu:
            self._updates.append(MovedChunk("update", size, since, time.monotonic()))

    # ---- movement -----------------------------------------------------------------------------------

    def bring(self, rest: Tensor) -> BorrowedTensor:
        """Start to bring a tensor to the device; one that is already there is returned unchanged."""
        if self.file is not None and (offset := self.file.locate(rest)) is not None:
            if (buffer := self._gathered.take(wait=False)) is None:
                return BorrowedTensor(rest.to(self.device))
            return self._read(rest, offset, buffer, self._gathered)
        if rest.device.type == self.device.type:
            return BorrowedTensor(rest)
        assert self._copies is not None
        with self._streams.use(self._copies):
            values = rest.to(self.device, non_blocking=True)
        return BorrowedTensor(values, ready=lambda: self._join(values))

    def read(self, rest: Tensor, *, into: Tensor) -> SwapTransfer:
        """Start to read a tensor on disk into whole blocks of memory."""
        assert self.file is not None
        return self.file.read(self.file.place(rest), into=into)

    def write(self, rest: Tensor, *, values: Tensor) -> SwapTransfer:
        """Start to write whole blocks of memory to a tensor on disk."""
        assert self.file is not None
        return self.file.write(self.file.place(rest), values=values)

    def store(self, values: Tensor, *, into: Tensor) -> None:
        """Start to copy values of the device into `into`, on its tier; `settle` ends it."""
        if self.file is None or (offset := self.file.locate(into)) is None:
            if self._copies is None:
                into.copy_(values)
                return
            self._copies.wait_stream(self._streams.current())
            with self._streams.use(self._copies):
                into.copy_(values, non_blocking=True)
            self._streams.keep(values, stream=self._copies)
            return
        source = values.view(torch.uint8)
        for low in range(0, source.numel(), self.staging.size):
            piece = source[low : low + self.staging.size]
            buffer = self.staging.take()
            assert buffer is not None
            buffer[: piece.numel()].copy_(piece)
            transfer = self.file.write(offset + low, values=buffer[: whole_blocks(piece.numel())])
            transfer.then(lambda buffer=buffer: self.staging.give(buffer))  # type: ignore[misc] # one for each
            self._stored.append(transfer)

    def mark(self) -> Callable[[], None]:
        """Return a function that waits, on any thread, until all work issued so far is done."""
        stored = SwapTransfer.of(self._stored)
        if self._copies is None:
            return stored.wait
        self._copies.wait_stream(self._streams.current())
        event = self._streams.event()
        event.record(self._copies)

        def there() -> None:
            stored.wait()
            event.synchronize()

        return there

    def settle(self) -> None:
        """Wait until everything that `store` started has ended. Raises TierError when it failed."""
        stored, self._stored = self._stored, []
        for transfer in stored:
            transfer.wait()
        if self._copies is not None:
            self._copies.synchronize()

    def on_copy_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, this thread copies on a separate stream, while another one computes."""
        return contextlib.nullcontext() if self._copies is None else self._streams.use(self._copies)

    def close(self) -> None:
        """Close the swap file."""
        if self.file is not None:
            self.file.close()

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def _moves(self) -> bool:
        """True if anything that an update needs is on another tier."""
        return any(self.is_offloaded(what) for what in ("optimizer", "masters", "gradients", "params"))

    def _read(self, rest: Tensor, offset: int, buffer: Tensor, staging: StagingBuffers) -> BorrowedTensor:
        assert self.file is not None
        size = rest.numel() * rest.element_size()
        transfer = self.file.read(offset, into=buffer[: whole_blocks(size)])
        values = buffer[:size].view(rest.dtype)
        if not self._on_gpu:
            return BorrowedTensor(values, ready=transfer.wait, release=lambda: staging.give(buffer))
        moved, copied = torch.empty_like(values, device=self.device), self._streams.event()

        def ready() -> None:
            transfer.wait()
            moved.copy_(values, non_blocking=True)
            copied.record()

        def give() -> None:
            copied.synchronize()
            staging.give(buffer)

        def release() -> None:
            assert self.file is not None
            self.file.later(give)

        return BorrowedTensor(moved, ready=ready, release=release)

    def _join(self, values: Tensor) -> None:
        assert self._copies is not None
        current = self._streams.current()
        current.wait_stream(self._copies)
        self._streams.keep(values, stream=current)

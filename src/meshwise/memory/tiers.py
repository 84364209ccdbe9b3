"""Tiers for parameters, masters and gradients, and their way to the device and back.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.comm.api.streams import streams_of
from meshwise.memory.rehearsed_movers import RehearsedFile
from meshwise.memory.staging_buffers import StagingBuffers, SwapConfig
from meshwise.memory.swap_file import BLOCK, REMEMBERED, MovedChunk, SwapFile, SwapTransfer
from meshwise.plan.plan_keys import Offload

GATHERED_AHEAD = 3
"""Staging buffers for parameters: those in use, the next, and the one after."""


class BorrowedTensor:
    """A tensor that rests elsewhere, while it is used where it is needed."""

    def __init__(
        self, values: Tensor, *, ready: Callable[[], None] | None = None, release: Callable[[], None] | None = None
    ) -> None:
        self._values = values
        self._ready = ready
        self._release = release

    def wait(self) -> Tensor:
        """Return the values, when they are there. Raises TierError when they do not come."""
        if self._ready is not None:
            self._ready()
        return self._values

    def release(self) -> None:
        """Give the tensors back; safe to call twice."""
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
        self._gathers: StagingBuffers | None = None
        self.told: Callable[[Tensor], None] | None = None
        """Is shown each staging buffer when it is made, on its first use."""
        self._largest = 0
        self._away: Counter[str] = Counter()
        self._round = BLOCK
        self._staging: StagingBuffers | None = None
        self._stored: list[SwapTransfer] = []
        self._updates: deque[MovedChunk] = deque(maxlen=REMEMBERED)
        self._streams = streams_of(self.device)
        self._copies = self._streams.create() if self._on_gpu and self.offload != Offload() else None

    @property
    def updates_on(self) -> torch.device:
        """Device on which the optimizer runs."""
        return torch.device("cpu") if self._updates_on_cpu and self._on_gpu else self.device

    @property
    def most(self) -> int | None:
        """Elements that are updated at once, whole blocks of any dtype; None: all that lie together.

        So that four tensors of fp32 fit a staging buffer: the master, its gradient and two of the optimizer's.
        """
        return max(BLOCK, self.swap.buffer // 16 // BLOCK * BLOCK) if self._moves else None

    @property
    def staging(self) -> StagingBuffers:
        """The buffers of the update."""
        if self._staging is None:
            hurry = {"hurry": self.file.hurry} if isinstance(self.file, RehearsedFile) else {}
            self._staging = StagingBuffers(
                count=self.swap.buffers, size=self._round, on=self.device, told=self.told, **hurry
            )
        return self._staging

    @property
    def _gathered(self) -> StagingBuffers:
        """The buffers of parameters on their way to a gather."""
        if self._gathers is None:
            self._gathers = StagingBuffers(count=GATHERED_AHEAD, size=self._largest, on=self.device, told=self.told)
        return self._gathers

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes of a staging buffer for a round of the update."""
        self._round = max(self._round, size)

    @property
    def staged(self) -> int:
        """Bytes of all staging buffers that there are."""
        return sum(one.bytes for one in (self._gathers, self._staging) if one is not None)

    # ---- at rest -----------------------------------------------------------------------------------------------

    def leaves(self, what: str) -> bool:
        """Return whether it rests elsewhere than where it is used."""
        tier = getattr(self.offload, what)
        return tier == "disk" or (tier == "cpu" and self._on_gpu)

    def empty(self, what: str, *, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor in one dim where parameters, masters, gradients or the optimizer's state rest.

        Contents are unspecified. Raises TierError when the disk has no room.
        """
        if getattr(self.offload, what) == "disk":
            assert self.file is not None
            self._away[what] += numel * dtype.itemsize
            if what in ("params", "gradients"):
                self._largest = max(self._largest, numel * dtype.itemsize)
            return self.file.allocate(numel, dtype=dtype)
        return self._streams.host_empty([numel], dtype=dtype)

    def where(self, tensor: Tensor) -> str:
        """Return the tier that a tensor lies in."""
        if self.on_disk(tensor):
            return "disk"
        return "device" if tensor.device.type == self.device.type else "cpu"

    def bytes(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
        """Return bytes of tensors by what they are, those that are not on the device with their tier:
        `disk/optimizer`.
        """
        total: Counter[str] = Counter()
        for what, tensor in tensors:
            tier = self.where(tensor)
            total[what if tier == "device" else f"{tier}/{what}"] += tensor.nbytes
        return dict(total)

    @property
    def resting(self) -> Sequence[Tensor]:
        """Tensors that rest on disk in a rehearsal."""
        return self.file.tensors if isinstance(self.file, RehearsedFile) else ()

    @property
    def away(self) -> Mapping[str, int]:
        """Bytes that rest on disk, by what they are."""
        return self._away

    def on_disk(self, tensor: Tensor) -> bool:
        """Return whether it rests on disk."""
        return self.file is not None and self.file.locate(tensor) is not None

    @property
    def moved(self) -> list[MovedChunk]:
        """The reads and writes of the last steps, and the updates of what rests elsewhere."""
        return [*(() if self.file is None else self.file.moved), *self._updates]

    def updated(self, size: int, *, since: float) -> None:
        """Note that `size` bytes have been updated since a time of `time.monotonic`."""
        if self._updates_on_cpu:
            self._updates.append(MovedChunk("update", size, since, time.monotonic()))

    # ---- to its use and back -----------------------------------------------------------------------------------

    def bring(self, rest: Tensor) -> BorrowedTensor:
        """Start to bring a tensor to the device; one that is already there is lent unchanged."""
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
        """Start to put values of the device where `into` rests; `settle` ends it."""
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
            transfer = self.file.write(offset + low, values=buffer[: blocks(piece.numel())])
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
        """Return when what was stored is there. Raises TierError when it cannot be."""
        stored, self._stored = self._stored, []
        for transfer in stored:
            transfer.wait()
        if self._copies is not None:
            self._copies.synchronize()

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, a thread copies beside the stream that computes."""
        return contextlib.nullcontext() if self._copies is None else self._streams.use(self._copies)

    def close(self) -> None:
        """Give the file back."""
        if self.file is not None:
            self.file.close()

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def _moves(self) -> bool:
        """True if anything that an update needs is elsewhere."""
        return any(self.leaves(what) for what in ("optimizer", "masters", "gradients", "params"))

    def _read(self, rest: Tensor, offset: int, buffer: Tensor, staging: StagingBuffers) -> BorrowedTensor:
        assert self.file is not None
        size = rest.numel() * rest.element_size()
        transfer = self.file.read(offset, into=buffer[: blocks(size)])
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


def blocks(size: int) -> int:
    """Return bytes of the whole blocks that hold `size`."""
    return -(-size // BLOCK) * BLOCK

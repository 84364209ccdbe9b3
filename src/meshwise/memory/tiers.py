"""Store parameters, masters, gradients and optimizer state on their tiers, and move them to the device and back.

The tier `cpu` is pinned memory of the host if the rank computes on a GPU. Its copies run on two separate CUDA streams,
one for each direction. On a CPU it is the same memory, so nothing moves. Data of the tier `disk` passes through staging
buffers, which are pinned beside a GPU, to and from the swap file of the rank.

A tensor on any tier can be read and filled like any other tensor; `bring` and `store` are faster. If nothing is
offloaded, `Tiers` moves nothing."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from meshwise.comm.api.streams import HostStream, StreamEvent, Streams, streams_of
from meshwise.memory.swap_file import (
    BLOCK,
    REMEMBERED,
    BufferPool,
    PinnedSlabs,
    RehearsedFile,
    SwapConfig,
    SwapFile,
    SwapTransfer,
    TierActivity,
    whole_blocks,
)
from meshwise.plan.plan_keys import Offload


class BorrowedTensor(NamedTuple):
    """Copy of an offloaded tensor on the device, for a short use.

    `ready`: waits until `values` are complete. `release`: frees their memory; call it once, at the end of the use."""

    values: Tensor
    ready: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None

    def wait(self) -> Tensor:
        """Wait for the values, and return them. Raises TierError if a read failed."""
        self.ready()
        return self.values


class Tiers:
    """Storage of one rank's offloaded tensors, and their movement between the tiers and the device."""

    def __init__(
        self, offload: Offload | None = None, *, streams: Streams | None = None, swap: SwapConfig | None = None
    ) -> None:
        """`streams`: of the device that computes, by default the CPU. Raises TierError if no swap file can be made."""
        self.offload = offload or Offload()
        self._streams = streams or streams_of(torch.device("cpu"))
        self.device = self._streams.device
        self._on_gpu = self.device.type == "cuda"
        self.updates_on = torch.device("cpu") if self.offload.updates_on_cpu and self._on_gpu else self.device
        """Device on which the optimizer runs: the CPU if the plan's tiers require it, otherwise `device`."""
        self.swap = swap or SwapConfig()
        moves = any(self.is_offloaded(what) for what in ("optimizer", "masters", "gradients", "params"))
        self.chunk_limit = max(BLOCK, self.swap.buffer // 16 // BLOCK * BLOCK) if moves else None
        """Largest number of elements in a chunk of the update, a multiple of 4096; None (no limit) without offloading.
        So four fp32 tensors of a chunk fit into a staging buffer: the master, its gradient, two optimizer states."""
        self.file: SwapFile | None = None
        if self.offload.uses_disk:
            self.file = RehearsedFile() if self.device.type == "meta" else SwapFile(self.swap.folder)
        self.on_new_buffer: Callable[[Tensor], None] = lambda _: None
        self.disk_bytes: Counter[str] = Counter()
        """Bytes that `empty` has allocated on disk, by kind: `params`, `masters`, `gradients` or `optimizer`."""
        self._largest = 0
        self.staging_size = BLOCK
        """Bytes of each staging buffer of the update; it may grow before `staging` is used."""
        self._pools: list[BufferPool] = []
        self._stored: list[SwapTransfer] = []
        self._updates: deque[TierActivity] = deque(maxlen=REMEMBERED)
        create = self._streams.create if self._on_gpu and moves else HostStream
        self._out, self._in = create(), create()
        self._pinned = PinnedSlabs(self._streams)

    @cached_property
    def staging(self) -> BufferPool:
        """Staging buffers of the update and of `store`, each of `staging_size` bytes."""
        is_rehearsal = isinstance(self.file, RehearsedFile)
        return self._new_pool(self.swap.buffers * self.staging_size, is_disk_slow=is_rehearsal)

    @cached_property
    def _gathered(self) -> BufferPool:
        """Staging buffers of parameters (or gradients) that `bring` reads from disk.

        There are three: for the unit in use, and for the next two gathers."""
        return self._new_pool(3 * whole_blocks(self._largest))

    def _new_pool(self, most: int, *, is_disk_slow: bool = False) -> BufferPool:
        pool = BufferPool(most, streams=self._streams, on_new_buffer=self.on_new_buffer, is_disk_slow=is_disk_slow)
        self._pools.append(pool)
        return pool

    @property
    def staged(self) -> int:
        """Bytes of all staging buffers made so far."""
        return sum(one.bytes for one in self._pools)

    # ---- storage -----------------------------------------------------------------------------------------------

    def is_offloaded(self, what: str) -> bool:
        """Return whether tensors of kind `what` (see `empty`) are stored off the device that computes."""
        tier = getattr(self.offload, what)
        return tier == "disk" or (tier == "cpu" and self._on_gpu)

    def empty(self, what: str, *, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a new flat tensor on the tier of an offloaded kind; its values are undefined.

        `what`: `params`, `masters`, `gradients` or `optimizer`. Raises TierError if the disk has no room."""
        if getattr(self.offload, what) == "disk":
            assert self.file is not None
            self.disk_bytes[what] += numel * dtype.itemsize
            if what in ("params", "gradients"):
                self._largest = max(self._largest, numel * dtype.itemsize)
            return self.file.allocate(numel, dtype=dtype)
        if self._on_gpu:
            return self._pinned.cut(numel * dtype.itemsize).view(dtype)
        return self._streams.host_empty([numel], dtype=dtype)

    def bytes(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
        """Return the bytes of (kind, tensor) pairs, by kind; if off the device, by `disk/kind` or `cpu/kind`."""
        total: Counter[str] = Counter()
        for what, tensor in tensors:
            away = "" if tensor.device.type == self.device.type else "cpu/"
            total[f"{'disk/' if self.on_disk(tensor) else away}{what}"] += tensor.nbytes
        return dict(total)

    @property
    def disk_tensors(self) -> Sequence[Tensor]:
        """In a rehearsal, the meta tensors in place of tensors on disk. Empty in a real run."""
        return self.file.tensors if isinstance(self.file, RehearsedFile) else ()

    def on_disk(self, tensor: Tensor) -> bool:
        """Return whether a tensor is stored in the swap file."""
        return self.file is not None and self.file.locate(tensor) is not None

    @property
    def moved(self) -> list[TierActivity]:
        """The last reads and writes of the swap file, then the last updates on the CPU; at most 10,000 of each."""
        return [*(() if self.file is None else self.file.moved), *self._updates]

    def record_update(self, size: int, *, since: float) -> None:
        """Record an update of `size` bytes of masters, from `since` (`time.monotonic`) to now, if the CPU updates."""
        if self.offload.updates_on_cpu:
            self._updates.append(TierActivity("update", size, since, time.monotonic()))

    # ---- movement ----------------------------------------------------------------------------------------------

    def bring(self, tensor: Tensor) -> BorrowedTensor:
        """Start to copy an offloaded tensor to the device. A tensor that is on the device is not copied."""
        if self.file is not None and (offset := self.file.locate(tensor)) is not None:
            if (buffer := self._gathered.take_now(whole_blocks(self._largest))) is None:
                return BorrowedTensor(tensor.to(self.device))
            return self._read(tensor, offset, buffer)
        if tensor.device.type == self.device.type:
            return BorrowedTensor(tensor)
        with self._streams.use(self._in):
            values = tensor.to(self.device, non_blocking=True)
            copied = self._streams.mark()
        return BorrowedTensor(values, ready=lambda: self._join(values, copied))

    def read(self, tensor: Tensor, *, into: Tensor) -> SwapTransfer:
        """Start to read a tensor on disk into `into` (uint8, whole blocks, as from a staging buffer)."""
        assert self.file is not None
        return self.file.read(self.file.place(tensor), into=into)

    def write(self, tensor: Tensor, *, values: Tensor) -> SwapTransfer:
        """Start to write `values` (uint8, whole blocks, as from a staging buffer) to a tensor on disk."""
        assert self.file is not None
        return self.file.write(self.file.place(tensor), values=values)

    def store(self, values: Tensor, *, into: Tensor) -> None:
        """Start to copy `values` on the device into the offloaded tensor `into`; `settle` waits for the copy."""
        if self.file is None or (offset := self.file.locate(into)) is None:
            self._streams.copy_on(self._out, values=values, into=into)
            return
        for low, piece in enumerate(values.view(torch.uint8).split(self.staging_size)):
            buffer = self.staging.take(self.staging_size)
            copied = self._streams.copy_on(self._out, values=piece, into=buffer[: piece.numel()])
            transfer = self.file.write(
                offset + low * self.staging_size, values=buffer[: whole_blocks(piece.numel())], after=copied.synchronize
            )
            transfer.then(lambda buffer=buffer: self.staging.give(buffer))  # type: ignore[misc] # one for each
            self._stored.append(transfer)

    def settle(self) -> None:
        """Wait until all copies that `store` started have ended. Raises TierError if a write failed."""
        stored, self._stored = self._stored, []
        for transfer in stored:
            transfer.wait()
        self._out.synchronize()
        self._in.synchronize()

    def close(self) -> None:
        """Close the swap file when its transfers have ended."""
        if self.file is not None:
            self.file.close()

    def _read(self, tensor: Tensor, offset: int, buffer: Tensor) -> BorrowedTensor:
        assert self.file is not None
        size = tensor.numel() * tensor.element_size()
        transfer = self.file.read(offset, into=buffer[: whole_blocks(size)])
        values = buffer[:size].view(tensor.dtype)
        if not self._on_gpu:
            give_back = lambda: self._gathered.give(buffer)  # noqa: E731
            return BorrowedTensor(values, ready=transfer.wait, release=lambda: transfer.then(give_back))
        moved, copied = torch.empty_like(values, device=self.device), self._streams.event()

        def ready() -> None:
            transfer.wait()
            moved.copy_(values, non_blocking=True)
            copied.record(self._streams.current())

        def give() -> None:
            copied.synchronize()
            self._gathered.give(buffer)

        def release() -> None:
            assert self.file is not None
            if transfer.ended:
                self.file.later(give)
            else:  # no call has waited for the values
                transfer.then(give)

        return BorrowedTensor(moved, ready=ready, release=release)

    def _join(self, values: Tensor, copied: StreamEvent) -> None:
        current = self._streams.current()
        current.wait_event(copied)
        self._streams.keep(values, stream=current)

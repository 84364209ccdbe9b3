"""Lend a fixed number of buffers for reads from the disk and writes to the disk.

Reading ahead without a limit would hold the whole model in memory, and the tier `disk` would save nothing. So a read
waits for a free buffer; a buffer is free again when its content is written or no longer needed."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwise.comm.api.streams import Streams
from meshwise.memory.swap_file import BLOCK, aligned, whole_blocks

SLAB = 64 * 2**20
"""Least bytes of pinned memory that `PinnedSlabs` allocates at once."""


@dataclass(frozen=True)
class SwapConfig:
    """Configuration of the swap file and its staging buffers.

    | folder     folder of the file; None: the system's folder for temporary files
    | buffers    number of staging buffers of the update: one is read, one is updated, and one is written
    | buffer     bytes of each staging buffer; more if a single chunk does not fit"""

    folder: Path | None = None
    buffers: int = 3
    buffer: int = 64 * 2**20

    def __post_init__(self) -> None:
        if self.buffers < 2 or self.buffer < BLOCK:
            raise ValueError(
                f"{self.buffers} staging buffers of {self.buffer} bytes are too few or too small; give at least 2, of "
                f"at least {BLOCK} bytes"
            )


class PinnedSlabs:
    """Pinned memory that is cut from large pieces: torch rounds each allocation up to a power of two."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._rest = torch.empty(0, dtype=torch.uint8)

    def cut(self, size: int) -> Tensor:
        """Return `size` uninitialized bytes (uint8) that begin at a block; they are freed together with their slab."""
        room = whole_blocks(size)
        if room > self._rest.numel():
            self._rest = self._streams.host_empty([max(SLAB, 1 << (room - 1).bit_length())], dtype=torch.uint8)
        cut, self._rest = self._rest[:size], self._rest[room:]
        return cut


class StagingBuffers:
    """Pool of at most `count` buffers of `size` bytes each, made when they are first needed."""

    def __init__(
        self,
        *,
        count: int,
        size: int,
        streams: Streams,
        on_new_buffer: Callable[[Tensor], None] = lambda _: None,
        is_disk_slow: bool = False,
    ) -> None:
        """`streams`: of the device that computes; for a GPU the buffers are pinned. `on_new_buffer` gets new buffers.

        `is_disk_slow`: make all buffers before one is used again, as if no write ended in time. Rehearsals do so."""
        self.size = whole_blocks(size)
        self._streams = streams
        self._left = count
        self._on_new_buffer = on_new_buffer
        self._is_disk_slow = is_disk_slow
        self._free: list[Tensor] = []
        self._returned = threading.Condition()
        self.bytes = 0
        """Bytes of all buffers made so far."""

    def take(self, *, wait: bool = True) -> Tensor | None:
        """Return a free buffer. If none is free, wait for one; without `wait`, return None."""
        with self._returned:
            if self._left and (self._is_disk_slow or not self._free):
                self._left -= 1
                self.bytes += self.size
                buffer = aligned(self.size, streams=self._streams)
                self._on_new_buffer(buffer)
                return buffer
            while not self._free:
                if not wait:
                    return None
                self._returned.wait()
            return self._free.pop()

    def give(self, buffer: Tensor) -> None:
        """Return `buffer` to the pool, and wake one waiting `take`."""
        with self._returned:
            self._free.append(buffer)
            self._returned.notify()

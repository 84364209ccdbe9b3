"""A fixed number of buffers through which everything passes that is read from disk or written there.

Read-ahead without a bound would hold the whole model in memory, which is what the disk was to spare. Here nothing is
read before a buffer is free for it, and a buffer is free again when its content is written.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwise.memory.swap_file import BLOCK, aligned, whole_blocks


@dataclass(frozen=True)
class SwapConfig:
    """Configuration of the swap file and its staging buffers.

    | folder     where the file is made; by default where the system keeps temporary files
    | buffers    how many staging buffers there are for the update: one is read ahead, one updated, one written
    | buffer     bytes of each; larger where what is updated at once does not fit
    """

    folder: Path | None = None
    buffers: int = 3
    buffer: int = 64 * 2**20

    def __post_init__(self) -> None:
        if self.buffers < 2 or self.buffer < BLOCK:
            raise ValueError(
                f"{self.buffers} staging buffers of {self.buffer} bytes; give at least 2, of at least {BLOCK} bytes"
            )


class StagingBuffers:
    """`count` buffers of `size` bytes each, made when they are first needed."""

    def __init__(
        self,
        *,
        count: int,
        size: int,
        device: torch.device,
        on_new_buffer: Callable[[Tensor], None] = lambda _: None,
        is_disk_slow: bool = False,
    ) -> None:
        """`device`: the device that computes; for a GPU the buffers are pinned. `on_new_buffer` receives each new one.

        `is_disk_slow`: make all buffers before one is used again, as if no write had ended in time. A rehearsal counts
        them that way.
        """
        self.size = whole_blocks(size)
        self._device = device
        self._left = count
        self._on_new_buffer = on_new_buffer
        self._is_disk_slow = is_disk_slow
        self._free: list[Tensor] = []
        self._returned = threading.Condition()
        self.bytes = 0

    def take(self, *, wait: bool = True) -> Tensor | None:
        """Return a buffer; None when none is free and `wait` is False."""
        with self._returned:
            if self._left and (self._is_disk_slow or not self._free):
                self._left -= 1
                self.bytes += self.size
                buffer = aligned(self.size, device=self._device)
                self._on_new_buffer(buffer)
                return buffer
            while not self._free:
                if not wait:
                    return None
                self._returned.wait()
            return self._free.pop()

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        with self._returned:
            self._free.append(buffer)
            self._returned.notify()

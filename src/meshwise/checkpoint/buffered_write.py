"""Write live tensors to a file through a staging buffer of fixed size (`BufferedWriter`).

    live tensors ──copy──► chunk chunk chunk … ──checksum, write──► file
                 thread 1           │          thread 2
                                    └─ a fixed number; written chunks are filled again

Training may change the tensors as soon as all of them are copied to chunks. If the file fits into the buffer, training
does not wait for the disk. If it is larger, training waits until all but the last buffer of the file is written. A full
copy of the tensors would need twice the memory."""

import os
import queue
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshwise.checkpoint.checkpoint_index import BLOCK, CheckpointFile
from meshwise.comm.api.streams import Streams

CHUNK_BYTES = 8 * BLOCK
"""Bytes of a chunk, in whole blocks, because each block has its own checksum."""
STAGING_BYTES = 8 * CHUNK_BYTES
"""Bytes of the staging buffer by default."""


class BufferedWriter:
    """Writer of a new file at `path`: the bytes `head`, then the elements of `tensors` in order.

    A thread begins to copy the tensors to chunks when the writer is made. The thread that calls `write` writes the
    chunks to the file. `staging`: largest size of the buffer, in bytes; the buffer has at least two chunks."""

    def __init__(
        self, path: Path, *, head: bytes, tensors: Sequence[Tensor], streams: Streams, staging: int = STAGING_BYTES
    ) -> None:
        self._path = path
        self._head = head
        self._tensors = tensors
        size = len(head) + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        count = max(2, min(staging // CHUNK_BYTES, -(-size // CHUNK_BYTES)))
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[Tensor, int] | None] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(streams.host_empty([min(CHUNK_BYTES, -(-size // BLOCK) * BLOCK)], dtype=torch.uint8))
        self._staged = threading.Event()
        self._errors: list[Exception] = []
        self._copier = threading.Thread(target=self._copy, name=f"stage {path.name}")
        self._copier.start()

    def wait_staged(self) -> None:
        """Wait until all tensors are copied to chunks, or copying has failed; they are not read again."""
        self._staged.wait()

    def write(self) -> CheckpointFile:
        """Write the file on the calling thread, once, and return its size and checksums. Raises OSError."""
        checksums: list[int] = []
        size = 0
        try:
            with self._path.open("xb") as file:  # x: never write to an existing file or through a link
                while (item := self._full.get()) is not None:
                    chunk, length = item
                    data = chunk.numpy().data[:length]
                    checksums += [zlib.crc32(data[start : start + BLOCK]) for start in range(0, length, BLOCK)]
                    file.write(data)
                    size += length
                    self._free.put(chunk)
                self._full.put(None)  # the end mark again: the loop in `except` stops at it if flush or fsync fails
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            # The copier ends only if it gets all chunks back.
            while (item := self._full.get()) is not None:
                self._free.put(item[0])
            raise
        finally:
            self._copier.join()
        if self._errors:
            raise self._errors[0]
        return CheckpointFile(size, tuple(checksums))

    def _copy(self) -> None:
        try:
            chunk, filled = self._free.get(), 0
            for source in self._sources():
                done = 0
                while done < source.numel():
                    if filled == chunk.numel():
                        self._full.put((chunk, filled))
                        chunk, filled = self._free.get(), 0
                    width = min(chunk.numel() - filled, source.numel() - done)
                    chunk[filled : filled + width].copy_(source[done : done + width])
                    filled, done = filled + width, done + width
            self._full.put((chunk, filled))
        except Exception as error:  # noqa: BLE001 - `write` raises it
            self._errors.append(error)
        finally:
            self._tensors = ()
            self._full.put(None)
            self._staged.set()

    def _sources(self) -> Iterator[Tensor]:
        yield torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
        for tensor in self._tensors:
            yield tensor.detach().reshape(-1).view(torch.uint8)  # reshape copies a tensor that is not contiguous

"""Save a checkpoint in the background: every rank writes its own file, then rank 0 moves the folder into place.

    | every rank   stages and flushes rank-N.safetensors, then writes rank-N.json, its rows of the index
    | rank 0       when every rank-N.json exists: writes checkpoint.json, renames the folder, writes `latest`

Training continues meanwhile, and the background thread may use no collectives. So rank 0 waits until the files of the
other ranks appear in the folder. `PendingSave()` and `wait` use collectives, so that every rank learns the result.

`BufferedWriter` writes live tensors through a staging buffer of fixed size:

    live tensors ──copy──► chunk chunk chunk … ──checksum, write──► file
                 thread 1           │          thread 2
                                    └─ a fixed number; written chunks are filled again

docs/checkpoints.md says when training waits for the buffer ("Saving during training")."""

import contextlib
import json
import math
import os
import queue
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwise.base.atomic_file import write_whole
from meshwise.checkpoint.checkpoint_folder import checkpoints, make_partial_folder, move_into_place, prune
from meshwise.checkpoint.checkpoint_format import (
    BLOCK,
    FORMAT,
    INDEX,
    CheckpointFile,
    CheckpointIndex,
    SaveError,
    TensorSpec,
    dtype_name,
    header,
    index_text,
    parse_index,
)
from meshwise.comm.api.streams import Streams
from meshwise.comm.api.world import World
from meshwise.data_parallel.checkpoint_slices import StoredSlice

CHUNK_BYTES = 8 * BLOCK
"""Bytes of a chunk, in whole blocks, because each block has its own checksum."""
STAGING_BYTES = 8 * CHUNK_BYTES


class BufferedWriter:
    """Writer of a new file at `path`: the bytes `head`, then the elements of `tensors` in order.

    A thread begins to copy the tensors when the writer is made. `streams` allocates the buffer of at most `staging`
    bytes, but at least two chunks. `read` returns the values to write for a tensor; None: its own."""

    def __init__(
        self,
        path: Path,
        *,
        head: bytes,
        tensors: Sequence[Tensor],
        streams: Streams,
        staging: int = STAGING_BYTES,
        read: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._path = path
        self._head = head
        self._tensors = tensors
        self._read = read
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
            values = tensor if self._read is None else self._read(tensor)
            yield values.detach().reshape(-1).view(torch.uint8)  # reshape copies a tensor that is not contiguous


_SHORTEST_NAP, _LONGEST_NAP = 0.001, 0.05
_GRACE_SECONDS = 20.0
"""Seconds that rank 0 still waits for the other ranks' files after `detach` or the end of the main thread."""


class PendingSave:
    """A save that runs in the background on this rank.

    | folder     final path of the checkpoint
    | finished   whether `wait` has returned, or raised SaveError"""

    def __init__(
        self,
        folder: Path,
        *,
        holdings: Iterable[StoredSlice],
        aliases: Mapping[str, str],
        extra: Mapping[str, Any],
        world: World,
        keep_last: int | None = None,
        read: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Begin to save a checkpoint in the background. Every rank calls it.

        | holdings    this rank's slices; all ranks together have each element of every logical tensor once
        | aliases     first name of a tied parameter, by each of its other names; the first rank's are saved
        | extra       values as JSON; the first rank's are saved
        | keep_last   number of valid checkpoints to keep in the root after this save (`prune`); None removes none
        | read        as in `BufferedWriter`

        Returns when the tensors that may change before the next optimizer step are copied. Raises SaveError on every
        rank if one rank cannot begin: the folder cannot be created, or a value cannot be stored in a checkpoint."""
        self.folder = folder
        self._more = {"aliases": dict(aliases), "extra": dict(extra)}
        self._world = world
        self._keep_last = keep_last
        self._cancelled = threading.Event()
        self._detached = threading.Event()
        self._written = threading.Event()
        self._problem: str | None = None
        self._outcome: str | None = None
        self.finished = False
        self._name = f"rank-{world.rank:05}.safetensors"
        self._rows: Mapping[str, Any] = {}
        self._partial, written, head = self._begin(holdings)
        # Tensors that may change are cloned, or if they are too large, staged before this method returns.
        clones = sum(part.tensor.nbytes for part in written if not part.stable) <= CHUNK_BYTES
        tensors = [part.tensor.clone() if clones and not part.stable else part.tensor for part in written]
        path = self._partial / self._name
        self._writer = BufferedWriter(path, head=head, tensors=tensors, streams=world.streams, read=read)
        self._thread = threading.Thread(target=self._run, name=f"save {folder.name}")
        self._thread.start()
        if not clones:
            self.wait_staged()

    def _begin(self, holdings: Iterable[StoredSlice]) -> tuple[Path, list[StoredSlice], bytes]:
        """Return the partial folder, which rank 0 creates, and the slices and the header of this rank's file. Sets the
        rank's rows of the index. Raises SaveError on every rank."""
        rank, partial, problem = self._world.rank, "", None
        written, head = list[StoredSlice](), b""
        try:
            json.dumps(self._more, allow_nan=False)
        except (TypeError, ValueError) as error:
            problem = f"extra has to be JSON: {error}"
        try:
            parts = list(holdings)
            # Widest elements first: then every tensor begins at a multiple of its element size.
            written = sorted((part for part in parts if part.rectangle.numel), key=lambda part: -part.tensor.itemsize)
            specs = [TensorSpec(_entry(part), part.tensor.dtype, tuple(part.tensor.shape)) for part in written]
            head, self._rows = header(specs, metadata={}), _rows(parts, self._name)
            partial = str(make_partial_folder(self.folder)) if rank == 0 else ""
        except (ValueError, OSError) as error:
            problem = _message(error)
        outcomes = self._world.exchange((partial, problem))
        partial = outcomes[0][0]
        if problems := _by_rank(problem for _, problem in outcomes):
            if rank == 0 and partial:
                shutil.rmtree(partial, ignore_errors=True)
            raise SaveError(f"{self.folder} was not saved: {'; '.join(problems)}")
        return Path(partial), written, head

    def wait_staged(self) -> None:
        """Wait until all tensors are staged; from then on, they may change."""
        self._writer.wait_staged()

    @property
    def done(self) -> bool:
        """True if this rank's part has ended, also by an error; `wait` then only waits for other ranks."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its folder. Every rank calls it, and may call it again.

        Raises SaveError on every rank if the save failed; older checkpoints are then unchanged."""
        if not self.finished:
            self._written.wait()
            problems = self._exchange(self._problem)
            if not problems:
                self._thread.join()
                problems = self._exchange(self._outcome)
            self._problem = "; ".join(problems) or None
            if problems:
                if self._world.rank == 0:
                    self.cancel()
                    shutil.rmtree(self._partial, ignore_errors=True)
                self._exchange(None)  # the partial folder is removed before any rank raises
            self.finished = True
        if self._problem is not None:
            raise SaveError(f"{self.folder} was not saved: {self._problem}")
        return self.folder

    def detach(self) -> None:
        """Let the save end without `wait`; rank 0 then waits at most 20 s for other ranks' files. Not collective."""
        self._detached.set()

    def cancel(self) -> None:
        """Stop waiting for other ranks' files, so that an incomplete save fails; then wait for the thread to end."""
        self._cancelled.set()
        self._thread.join()

    def _exchange(self, problem: str | None) -> list[str]:
        """Return the problems of all ranks; every rank calls it. Cancels the save when a rank is lost."""
        try:
            return _by_rank(self._world.exchange(problem))
        except BaseException:
            self.cancel()
            raise

    # ---- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            file = self._writer.write()
            row = {"bytes": file.size, "crc32": [f"{checksum:08x}" for checksum in file.checksums]}
            text = json.dumps({"files": {self._name: row}, "tensors": self._rows})
            _write(self._row(self._world.rank), text)
        except Exception as error:  # noqa: BLE001 - `wait` raises it on every rank
            self._problem = _message(error)
        finally:
            self._written.set()
        if self._world.rank == 0 and self._problem is None:
            try:
                self._publish()
            except Exception as error:  # noqa: BLE001 - `wait` raises it on every rank
                self._outcome = _message(error)

    def _publish(self) -> None:
        rows = [self._row(rank) for rank in range(self._world.size)]
        if not self._all_written(rows):
            self._outcome = "a rank did not write its file"
            return
        earlier = [i.sequence for _, i in checkpoints(self.folder.parent) if isinstance(i, CheckpointIndex)]
        body = {
            "format": FORMAT,
            "sequence": max(earlier, default=0) + 1,
            **_merge(json.loads(row.read_text(encoding="utf-8")) for row in rows),
            **self._more,
        }
        parse_index(self._partial, body=body)  # raises if the parts of the ranks do not make up the tensors
        _write(self._partial / INDEX, index_text(body))
        for row in rows:
            row.unlink()
        move_into_place(self._partial, folder=self.folder)
        if self._keep_last is not None:
            # A checkpoint that cannot be removed now is removed after a later save.
            with contextlib.suppress(OSError):
                prune(self.folder.parent, keep_last=self._keep_last)

    def _all_written(self, rows: Sequence[Path]) -> bool:
        """Wait for the files of all ranks. Return False after `cancel`, or when the time after `detach` is over."""
        left, nap, deadline = rows, _SHORTEST_NAP, math.inf
        while left := [row for row in left if not row.exists()]:
            if self._cancelled.wait(nap) or time.monotonic() > deadline:
                return False
            if deadline == math.inf and (self._detached.is_set() or not threading.main_thread().is_alive()):
                deadline = time.monotonic() + _GRACE_SECONDS
            nap = min(2 * nap, _LONGEST_NAP)
        return True

    def _row(self, rank: int) -> Path:
        return self._partial / f"rank-{rank:05}.json"


def _write(path: Path, text: str) -> None:
    """Write a file that becomes visible only when it is completely on the disk. Raises OSError."""
    write_whole(path, write=lambda place: place.write_text(text, encoding="utf-8"))


def _entry(part: StoredSlice) -> str:
    """Return the name of a rectangle within its file."""
    return f"{part.key}@{','.join(map(str, part.rectangle.offsets))}"


def _rows(parts: Iterable[StoredSlice], file: str) -> dict[str, Any]:
    """Return the rows of the index for the slices of one rank."""
    rows: dict[str, Any] = {}
    for part in parts:
        row = rows.setdefault(part.key, {"dtype": dtype_name(part.tensor.dtype), "shape": [*part.shape], "parts": []})
        if part.rectangle.numel:
            offsets, sizes = list(part.rectangle.offsets), list(part.rectangle.sizes)
            row["parts"].append({"file": file, "entry": _entry(part), "offsets": offsets, "sizes": sizes})
    return rows


def _merge(shares: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the merged rows of all ranks."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for share in shares:
        files |= share["files"]
        for name, row in share["tensors"].items():
            tensors.setdefault(name, row | {"parts": []})["parts"] += row["parts"]
    return {"files": files, "tensors": tensors}


def _by_rank(problems: Iterable[str | None]) -> list[str]:
    return [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"

"""Find, check, replace, remove and load the folders of checkpoints; a new checkpoint appears complete or not at all.

A save writes into the folder `step-200.partial-…`, and one rename (`move_into_place`) makes it `step-200`.
docs/checkpoints.md has the order of these steps, and what a crash leaves ("Crashes and damage").

A checkpoint is loaded under any plan: every rank reads the blocks with its rectangles (`fill`, `CheckpointReader`).

    wanted rectangles ∩ stored rectangles ──► spans of bytes, in the order of the files (`spans`)
                                                  │  join adjacent spans, in whole blocks, up to a window
                                                  ▼
         read into the window ───► crc32 of every block ──► elements copied to their tensors (`read_spans`)

The window is the only buffer; data is copied a second time only if it is misaligned. Files of other programs have no
checksums. Files are read, not mapped: the system kills a process that reads past the end of a mapped file."""

import dataclasses
import errno
import itertools
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from meshwise.base.atomic_file import sync_to_disk, write_whole
from meshwise.checkpoint.checkpoint_format import (
    BLOCK,
    INDEX,
    CheckpointFile,
    CheckpointIndex,
    Damage,
    DamageError,
    StoredRectangle,
    StoredTensor,
    TensorEntry,
    read_header,
    read_index,
)
from meshwise.comm.api.world import World
from meshwise.data_parallel.checkpoint_slices import StoredSlice
from meshwise.layout.layout import Rectangle

WINDOW_BYTES = 8 * BLOCK
"""Bytes of the buffer, and the most bytes that are read together."""
_SPAN = WINDOW_BYTES - 2 * BLOCK
"""Most bytes of a span. Such a span fits into the window even when its first and last block are read whole."""


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A safetensors file to read: its entries by name, and its expected size and checksums."""

    path: Path
    expected: CheckpointFile
    entries: dict[str, TensorEntry]


@dataclass(frozen=True)
class ByteSpan:
    """A rectangle of an entry that is read in one piece: its bytes in the file, and the tensor to fill.

    | start, stop   bytes of the file from the first element to the end of the last; other elements may lie between
    | sizes         sizes of the rectangle
    | target        tensor of these sizes that the elements are copied to"""

    source: SourceFile
    start: int
    stop: int
    entry: TensorEntry
    sizes: tuple[int, ...]
    target: Tensor


def spans(source: SourceFile, *, entry: str, rectangle: Rectangle, target: Tensor) -> Iterator[ByteSpan]:
    """Yield spans that read `rectangle` of an entry into `target`; each span fits into the window.

    The rectangle's offsets count from the first element of the entry."""
    found = source.entries[entry]
    strides = torch.empty(found.shape, device="meta").stride()
    first = sum(map(int.__mul__, rectangle.offsets, strides))
    reach = sum((size - 1) * stride for size, stride in zip(rectangle.sizes, strides, strict=True))
    width = found.dtype.itemsize
    if (reach + 1) * width <= _SPAN:
        start = found.start + first * width
        yield ByteSpan(source, start, start + (reach + 1) * width, found, rectangle.sizes, target)
        return
    dim = next(dim for dim, size in enumerate(rectangle.sizes) if size > 1)
    below = reach - (rectangle.sizes[dim] - 1) * strides[dim]
    rows = max(1, (_SPAN // width - 1 - below) // strides[dim] + 1)
    for low in range(0, rectangle.sizes[dim], rows):
        high = min(low + rows, rectangle.sizes[dim])
        offsets = (*rectangle.offsets[:dim], rectangle.offsets[dim] + low, *rectangle.offsets[dim + 1 :])
        sizes = (*rectangle.sizes[:dim], high - low, *rectangle.sizes[dim + 1 :])
        part = target.narrow(dim, low, high - low)
        yield from spans(source, entry=entry, rectangle=Rectangle(offsets, sizes), target=part)


def read_spans(wanted: Iterable[ByteSpan]) -> None:
    """Copy the elements of all spans to their targets. Raises OSError, and DamageError for a wrong checksum."""
    buffer = torch.empty(WINDOW_BYTES, dtype=torch.uint8)
    ordered = sorted(wanted, key=lambda span: (span.source.path, span.start))
    for source, of_file in itertools.groupby(ordered, key=lambda span: span.source):
        with source.path.open("rb") as file:
            for start, stop, group in _windows(list(of_file), size=os.fstat(file.fileno()).st_size):
                read_blocks(source, file=file, start=start, into=buffer[: stop - start])
                for span in group:
                    data = buffer[span.start - start : span.stop - start]
                    if data.storage_offset() % span.entry.dtype.itemsize:
                        data = data.clone()
                    strides = torch.empty(span.entry.shape, device="meta").stride()
                    span.target.copy_(data.view(span.entry.dtype).as_strided(span.sizes, strides))


def read_blocks(source: SourceFile, *, file: BufferedReader, start: int, into: Tensor) -> None:
    """Fill `into` (bytes) from byte `start` of `file`. Compare each block with its checksum, if that is known.

    `start` is a multiple of `BLOCK`, and `into` ends where a block or the file ends. Raises OSError, and DamageError
    for missing or altered bytes."""
    view = into.numpy().data
    file.seek(start)
    if (count := file.readinto(view)) < len(view):
        raise _damage(source, (start, start + len(view)), f"{start + len(view)} bytes", f"{start + count}")
    if not source.expected.checksums:
        return
    for low in range(0, len(view), BLOCK):
        found, expected = zlib.crc32(view[low : low + BLOCK]), source.expected.checksums[(start + low) // BLOCK]
        if found != expected:
            at = (start + low, min(start + low + BLOCK, start + len(view)))
            raise _damage(source, at, f"the crc32 {expected:08x} of bytes {at[0]} to {at[1]}", f"{found:08x}")


def _damage(source: SourceFile, at: tuple[int, int], expected: str, found: str) -> DamageError:
    names = [entry.name for entry in source.entries.values() if entry.start < at[1] and entry.stop > at[0]]
    return DamageError([Damage(str(source.path), expected, found, tuple(names))])


def _windows(ordered: Sequence[ByteSpan], *, size: int) -> Iterator[tuple[int, int, list[ByteSpan]]]:
    """Yield (start, stop, spans) for each group of spans to read together: bytes `start` to `stop`, in whole blocks."""
    group: list[ByteSpan] = []
    start = stop = 0
    for span in ordered:
        end = min(size, -(-span.stop // BLOCK) * BLOCK)
        if group and (span.start > stop or max(stop, end) - start > WINDOW_BYTES):
            yield start, stop, group
            group = []
        if not group:
            start = stop = span.start // BLOCK * BLOCK
        group.append(span)
        stop = max(stop, end)
    if group:
        yield start, stop, group


_T = TypeVar("_T")


class CheckpointReader:
    """Reader of the logical tensors of one checkpoint, for one process. It reads the header of each file once."""

    def __init__(self, index: CheckpointIndex) -> None:
        self.index = index
        self._sources: dict[str, SourceFile] = {}

    def fill(self, holdings: Iterable[StoredSlice]) -> None:
        """Copy saved elements into the tensor of each slice. Tied parameters may have any of their names.

        Raises ValueError for a tensor that the checkpoint lacks, has in another shape, or has in a dtype whose values
        the wanted dtype cannot hold. Raises DamageError for altered bytes. Raises OSError."""
        read_spans([span for holding in holdings for span in self._spans(holding)])

    def stored(self, holding: StoredSlice) -> StoredTensor:
        """Return the stored tensor that `holding` is a slice of. Raises the ValueError of `fill`."""
        tensors, first = self.index.tensors, self.index.aliases.get(holding.name, holding.name)
        stored = tensors.get(holding.key) or tensors.get(f"{holding.slot}/{first}")
        if stored is None and holding.slot == "buffer":  # an import does not know which tensors are buffers
            stored = tensors.get(f"parameter/{holding.name}")
        if stored is None:
            raise ValueError(f"the checkpoint {self.index.folder} has no {holding.key}")
        if stored.shape != holding.shape:
            raise ValueError(f"{holding.key} has the shape {stored.shape} in the checkpoint, and {holding.shape} here")
        if not _holds(stored.dtype, holding):
            raise ValueError(
                f"{holding.key} is {stored.dtype} in the checkpoint and {holding.tensor.dtype} here, which cannot hold "
                "all its values; load it into a model of the same dtype"
            )
        return stored

    def _spans(self, holding: StoredSlice) -> Iterator[ByteSpan]:
        for part in self.stored(holding).parts:
            if overlap := part.rectangle.overlap(holding.rectangle):
                target = holding.tensor[overlap.seen_from(holding.rectangle.offsets).slices]
                inside = overlap.seen_from(part.rectangle.offsets)
                yield from spans(self._source(part), entry=part.entry, rectangle=inside, target=target)

    def _source(self, part: StoredRectangle) -> SourceFile:
        """Return the file of a part. Raises DamageError if its header contradicts the index."""
        if part.file not in self._sources:
            path = self.index.folder / part.file
            self._sources[part.file] = SourceFile(path, self.index.files[part.file], read_header(path))
        source = self._sources[part.file]
        entry = source.entries.get(part.entry)
        if entry is not None and (1, *entry.shape) == part.rectangle.sizes:  # one expert's matrix
            entry = source.entries[part.entry] = dataclasses.replace(entry, shape=part.rectangle.sizes)
        if entry is None or entry.shape != part.rectangle.sizes:
            found = "none" if entry is None else f"one of shape {entry.shape}"
            wanted = f"an entry {part.entry!r} of shape {part.rectangle.sizes}"
            raise DamageError([Damage(str(source.path), wanted, found, (part.entry,))])
        return source


def fill(index: CheckpointIndex, *, needed: Sequence[StoredSlice], world: World) -> None:
    """Fill the slices that this rank needs from a checkpoint. Every rank calls this function.

    Raises ValueError on every rank if one rank has a slice that cannot be loaded; then no slice is filled. Raises
    DamageError on every rank for damage or an OSError; some slices may then be filled."""
    reader = CheckpointReader(index)
    on_all_ranks(lambda: [reader.stored(holding) for holding in needed], world=world)
    on_all_ranks(lambda: reader.fill(needed), world=world)


def on_all_ranks(act: Callable[[], _T], *, world: World) -> _T:
    """Return the result of `act` on this rank. Every rank calls this function.

    If `act` raises DamageError or OSError on any rank, every rank raises DamageError with the damage of all ranks. Else
    every rank raises the first rank's ValueError, if there is one. A rank raises any other error alone."""
    result: list[_T] = []
    damages: tuple[Damage, ...] = ()
    problem = ""
    try:
        result.append(act())
    except DamageError as error:
        damages = error.damages
    except OSError as error:
        damages = (Damage(str(error.filename or ""), "a file that can be read", error.strerror or str(error)),)
    except ValueError as error:
        problem = str(error)
    outcomes = world.exchange((damages, problem))
    if found := list(dict.fromkeys(damage for damages, _ in outcomes for damage in damages)):
        raise DamageError(found)
    if problems := [problem for _, problem in outcomes if problem]:
        raise ValueError(problems[0])
    return result[0]


def _holds(stored: torch.dtype, holding: StoredSlice) -> bool:
    """Return whether a slice can take a dtype's values: without rounding, or from fp32 into a narrower parameter."""
    wanted = holding.tensor.dtype
    rounded = holding.slot == "parameter" and stored == torch.float32 and wanted in (torch.bfloat16, torch.float16)
    return stored == wanted or rounded or torch.promote_types(stored, wanted) == wanted


LATEST = "latest"
"""File of a root that holds the name of the newest checkpoint."""
DATA = "rank-*.safetensors"
_PARTIAL, _REPLACED = ".partial-", ".replaced-"


def checkpoints(root: Path) -> list[tuple[Path, CheckpointIndex | DamageError]]:
    """Return (path, index) of each checkpoint of a root, newest first; then (path, error) of each damaged index.

    If `root` is a checkpoint itself, return only this one."""
    found: list[tuple[Path, CheckpointIndex | DamageError]] = []
    inside = root.iterdir() if root.is_dir() else ()
    for path in [root] if is_checkpoint(root) else sorted(filter(is_checkpoint, inside), reverse=True):
        try:
            found.append((path, read_index(path)))
        except DamageError as error:
            found.append((path, error))
    return sorted(found, key=lambda item: -item[1].sequence if isinstance(item[1], CheckpointIndex) else 1)


def newest_valid(root: Path, *, without: Collection[Path] = ()) -> tuple[Path | None, list[Damage]]:
    """Return the newest checkpoint whose index and file sizes are right, or None; and the damages of damaged indices.

    Folders in `without` are skipped. The data is not read here: loading compares it with the checksums."""
    found = [(path, index) for path, index in checkpoints(root) if path not in without]
    damaged = [damage for _, index in found if isinstance(index, DamageError) for damage in index.damages]
    return next((path for path, index in found if isinstance(index, CheckpointIndex)), None), damaged


def make_partial_folder(folder: Path) -> Path:
    """Create a partial folder for the checkpoint `folder`, in the same root, and return its path.

    Raises OSError, and FileExistsError if `folder` is named `latest`, or exists and is no checkpoint and not empty."""
    if folder.name == LATEST:
        raise FileExistsError(errno.EEXIST, "this name is reserved for the newest checkpoint's name", str(folder))
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if os.path.lexists(folder) and not is_checkpoint(folder) and not is_empty:
        raise FileExistsError(errno.EEXIST, "it exists and is no checkpoint, so it is not replaced", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}{_PARTIAL}{secrets.token_hex(4)}")
    partial.mkdir()
    return partial


def move_into_place(partial: Path, *, folder: Path) -> None:
    """Rename a partial folder to `folder`, in place of an old checkpoint, and write `latest`. Raises OSError."""
    sync_to_disk(partial)
    replaced = None
    if folder.exists():
        replaced = folder.with_name(f"{folder.name}{_REPLACED}{secrets.token_hex(4)}")
        folder.rename(replaced)
    partial.rename(folder)
    sync_to_disk(folder.parent)
    write_whole(folder.with_name(LATEST), write=lambda path: path.write_text(f"{folder.name}\n", encoding="utf-8"))
    sync_to_disk(folder.parent)
    if replaced is not None:
        remove(replaced)


def remove(path: Path) -> None:
    """Remove a checkpoint (first renamed to a partial folder), a partial folder or a file. Raises OSError."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    if _PARTIAL not in path.name:
        path = path.rename(path.with_name(f"{path.name}{_PARTIAL}{secrets.token_hex(4)}"))
    shutil.rmtree(path)


def is_checkpoint(path: Path) -> bool:
    """Return whether the path is a folder with an index or with data files, and not a partial folder."""
    return path.is_dir() and _PARTIAL not in path.name and ((path / INDEX).exists() or any(path.glob(DATA)))


def prune(root: Path, *, keep_last: int) -> list[Path]:
    """Keep the `keep_last` newest valid checkpoints, remove all older ones, and return the removed paths.

    Only checkpoints whose name ends with a digit are counted and removed: `best` stays beside step-100. A checkpoint is
    valid if its index and the sizes of its files are right; a damaged one counts as older than all valid ones. Partial
    folders older than the newest valid checkpoint are removed too. Raises ValueError for `keep_last` < 1, OSError."""
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: give at least 1")
    valid: list[Path] = []
    removed: list[Path] = []
    for path, index in checkpoints(root):
        if not path.name.partition(_REPLACED)[0][-1].isdecimal():
            continue
        if len(valid) == keep_last:
            removed.append(path)
        elif isinstance(index, CheckpointIndex):
            valid.append(path)
    if valid:
        newest = (valid[0] / INDEX).stat().st_mtime_ns
        removed += [path for path in root.iterdir() if _PARTIAL in path.name and path.stat().st_mtime_ns < newest]
    for path in removed:
        remove(path)
    return removed


def damages(folder: Path) -> Iterator[Damage]:
    """Compare every byte of a checkpoint with its checksum, and yield every damage; of a damaged index its own only."""
    try:
        index = read_index(folder)
    except DamageError as error:
        yield from error.damages
        return
    for name in index.files:
        entries: dict[str, TensorEntry] = {}
        try:
            entries = read_header(folder / name)
        except DamageError as error:
            yield from error.damages
        except OSError as error:
            yield Damage(str(folder / name), "a file that can be read", str(error))
            continue
        yield from _altered_blocks(SourceFile(folder / name, index.files[name], entries))


def _altered_blocks(source: SourceFile) -> Iterator[Damage]:
    """Yield the damage of every block whose bytes do not match their checksum."""
    buffer = torch.empty(BLOCK, dtype=torch.uint8)
    with source.path.open("rb") as file:
        for start in range(0, source.expected.size, BLOCK):
            try:
                width = min(BLOCK, source.expected.size - start)
                read_blocks(source, file=file, start=start, into=buffer[:width])
            except DamageError as error:
                yield from error.damages

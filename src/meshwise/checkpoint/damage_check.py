"""Compare every byte of a checkpoint with its checksum (`damages`, `is_valid`), and two checkpoints (`differences`)."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError
from meshwise.checkpoint.checkpoint_index import BLOCK, CheckpointIndex, StoredTensor, read_index, tensors_of
from meshwise.checkpoint.load_state import CheckpointReader
from meshwise.checkpoint.read_rectangles import SourceFile, read_verified
from meshwise.checkpoint.safetensors_format import TensorEntry, read_header
from meshwise.data_parallel.stored_slices import StoredSlice
from meshwise.layout.rectangles import Rectangle, rectangles

_VERIFIED = "verified"
_MOST_ELEMENTS = 1 << 20


def damages(folder: Path) -> Iterator[Damage]:
    """Yield all that is wrong with a checkpoint; nothing when every byte is as it was written."""
    try:
        index = read_index(folder)
    except DamageError as error:
        yield from error.damages
        return
    for name in index.files:
        try:
            entries = read_header(folder / name)
        except DamageError:
            entries = {}  # that the header is no header shows in the first checksum
        except OSError as error:
            yield Damage(str(folder / name), "a file that can be read", str(error))
            continue
        yield from _bytes(SourceFile(folder / name, index.files[name], entries))
        yield from _misplaced(index, name, entries)


def is_valid(folder: Path) -> bool:
    """Return whether every byte of a checkpoint is as it was written; remembered in the folder once it was."""
    try:
        read_index(folder)
    except DamageError:
        return False
    if not (folder / _VERIFIED).exists():
        if any(True for _ in damages(folder)):
            return False
        (folder / _VERIFIED).touch()
    return True


@dataclass(frozen=True)
class CheckpointDifference:
    """Difference of one logical tensor between two checkpoints: `elements` differ, by at most `largest` (NaN if one of
    the two is NaN).
    """

    name: str
    what: str
    elements: int = 0
    largest: float = 0.0


def differences(first: CheckpointIndex, *, second: CheckpointIndex) -> Iterator[CheckpointDifference]:
    """Yield the logical tensors that are not bit for bit the same in two checkpoints, whatever plans these were saved
    under.

    Raises DamageError as loading does.
    """
    readers = CheckpointReader(first), CheckpointReader(second)
    for name in sorted(first.tensors.keys() | second.tensors.keys()):
        ours, theirs = first.tensors.get(name), second.tensors.get(name)
        if ours is None or theirs is None:
            yield CheckpointDifference(name, f"only in {(second if ours is None else first).folder}")
        elif (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield CheckpointDifference(name, f"{ours.dtype} {ours.shape} and {theirs.dtype} {theirs.shape}")
        elif found := _compare(name, ours, readers):
            yield found


def _compare(
    name: str, stored: StoredTensor, readers: tuple[CheckpointReader, CheckpointReader]
) -> CheckpointDifference | None:
    elements, largest = 0, 0.0
    size = torch.Size(stored.shape).numel()
    for start in range(0, size, _MOST_ELEMENTS):
        for rectangle in rectangles(stored.shape, start=start, stop=min(size, start + _MOST_ELEMENTS)):
            a, b = (_take(reader, name, rectangle) for reader in readers)
            unequal = a.view(torch.uint8).ne(b.view(torch.uint8)).view(-1, stored.dtype.itemsize).any(dim=1)
            if count := int(unequal.sum()):
                apart = (a.double() - b.double()).abs()[unequal]
                elements, largest = elements + count, float(apart.max().clamp(min=largest))
    return CheckpointDifference(name, f"{elements} of {size} elements differ", elements, largest) if elements else None


def _take(reader: CheckpointReader, name: str, rectangle: Rectangle) -> torch.Tensor:
    stored = reader.index.tensors[name]
    tensor = torch.empty(rectangle.sizes, dtype=stored.dtype)
    slot, _, own = name.partition("/")
    reader.fill([StoredSlice(own, slot, stored.shape, rectangle, tensor)])
    return tensor.reshape(-1)


def _bytes(source: SourceFile) -> Iterator[Damage]:
    """Blocks that are not as they were written."""
    assert source.expected is not None
    buffer = torch.empty(BLOCK, dtype=torch.uint8)
    descriptor = os.open(source.path, os.O_RDONLY)
    try:
        for start in range(0, source.expected.size, BLOCK):
            try:
                width = min(BLOCK, source.expected.size - start)
                read_verified(source, descriptor=descriptor, start=start, into=buffer[:width])
            except DamageError as error:
                yield from error.damages
    finally:
        os.close(descriptor)


def _misplaced(index: CheckpointIndex, name: str, entries: Mapping[str, TensorEntry]) -> Iterator[Damage]:
    """Parts that the index has and the header of their file has not, or has otherwise."""
    for tensor, part in tensors_of(index, file=name):
        entry = entries.get(part.entry)
        wanted = (index.tensors[tensor].dtype, part.rectangle.sizes)
        if entry is None or (entry.dtype, entry.shape) != wanted:
            found = "none" if entry is None else f"{entry.dtype} {entry.shape}"
            yield Damage(
                str(index.folder / name), f"an entry {part.entry!r}: {wanted[0]} {wanted[1]}", found, (tensor,)
            )

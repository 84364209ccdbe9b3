"""Compare every byte of a checkpoint with its checksum (`damages`, `is_valid`), and two checkpoints (`differences`)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError
from meshwise.checkpoint.checkpoint_index import BLOCK, CheckpointIndex, read_index
from meshwise.checkpoint.load_state import CheckpointReader
from meshwise.checkpoint.read_rectangles import SourceFile, read_blocks
from meshwise.checkpoint.safetensors_format import TensorEntry, read_header

_VERIFIED = "verified"
"""Name of an empty file in a checkpoint; the file means that all bytes were compared with their checksums once."""


def damages(folder: Path) -> Iterator[Damage]:
    """Read a whole checkpoint and yield every damage. If the index is damaged, yield only its damage."""
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


def is_valid(folder: Path) -> bool:
    """Return whether every byte of a checkpoint is as it was written.

    A valid folder gets the file `verified`: later calls compare only its index and its file sizes. Raises OSError.
    """
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
    """Difference of one logical tensor between two checkpoints.

    | description   in words
    | elements      number of elements that differ; 0 if the tensors cannot be compared element by element
    | largest       largest absolute difference; NaN if a differing element is NaN
    """

    name: str
    description: str
    elements: int = 0
    largest: float = 0.0


def differences(first: CheckpointIndex, *, second: CheckpointIndex) -> Iterator[CheckpointDifference]:
    """Yield a difference for each logical tensor that is not bit for bit equal in both. The two may have other plans.

    Raises DamageError or OSError, as loading does.
    """
    readers = CheckpointReader(first), CheckpointReader(second)
    for name in sorted(first.tensors.keys() | second.tensors.keys()):
        ours, theirs = first.tensors.get(name), second.tensors.get(name)
        if ours is None or theirs is None:
            yield CheckpointDifference(name, f"only in {(second if ours is None else first).folder}")
        elif (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            yield CheckpointDifference(name, f"{ours.dtype} {ours.shape} and {theirs.dtype} {theirs.shape}")
        elif found := _compare(name, readers):
            yield found


def _compare(name: str, readers: Sequence[CheckpointReader]) -> CheckpointDifference | None:
    """Return the difference of a tensor with the same dtype and shape in both checkpoints; None if there is none."""
    stored = readers[0].index.tensors[name]
    elements, largest = 0, 0.0
    for a, b in zip(*(reader.pieces(name) for reader in readers), strict=True):
        unequal = a.view(torch.uint8).ne(b.view(torch.uint8)).view(-1, stored.dtype.itemsize).any(dim=1)
        if count := int(unequal.sum()):
            apart = (a.double() - b.double()).abs()[unequal]
            elements, largest = elements + count, float(apart.max().clamp(min=largest))
    if not elements:
        return None
    return CheckpointDifference(name, f"{elements} of {math.prod(stored.shape)} elements differ", elements, largest)


def _altered_blocks(source: SourceFile) -> Iterator[Damage]:
    """Yield the damage of every block whose bytes do not match their checksum."""
    assert source.expected is not None
    buffer = torch.empty(BLOCK, dtype=torch.uint8)
    with source.path.open("rb") as file:
        for start in range(0, source.expected.size, BLOCK):
            try:
                width = min(BLOCK, source.expected.size - start)
                read_blocks(source, descriptor=file.fileno(), start=start, into=buffer[:width])
            except DamageError as error:
                yield from error.damages

"""Compare every byte of a checkpoint with its checksum (`damages`, `is_valid`)."""

from collections.abc import Iterator
from pathlib import Path

import torch

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError
from meshwise.checkpoint.checkpoint_index import BLOCK, read_index
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

    A valid folder gets the file `verified`: later calls compare only its index and its file sizes. Raises OSError."""
    try:
        read_index(folder)
    except DamageError:
        return False
    if not (folder / _VERIFIED).exists():
        if any(True for _ in damages(folder)):
            return False
        (folder / _VERIFIED).touch()
    return True


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

"""Load a checkpoint under any plan: every rank reads the blocks with its rectangles (`load`, `CheckpointReader`)."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from meshwise.checkpoint.checkpoint_errors import Damage, DamageError
from meshwise.checkpoint.checkpoint_index import CheckpointIndex, StoredRectangle, StoredTensor, read_index
from meshwise.checkpoint.read_rectangles import ByteSpan, SourceFile, read_spans, spans
from meshwise.checkpoint.safetensors_format import read_header
from meshwise.comm.api.world import World
from meshwise.data_parallel.stored_slices import StoredSlice
from meshwise.layout.layout import rectangles

_PIECE_ELEMENTS = 1 << 20
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

    def pieces(self, key: str) -> Iterator[Tensor]:
        """Yield a logical tensor in row-major order, as flat tensors of at most 2²⁰ elements. Raises as `fill` does."""
        stored = self.index.tensors[key]
        slot, _, name = key.partition("/")
        size = math.prod(stored.shape)
        for start in range(0, size, _PIECE_ELEMENTS):
            for part in rectangles(stored.shape, start=start, stop=min(size, start + _PIECE_ELEMENTS)):
                piece = torch.empty(part.sizes, dtype=stored.dtype)
                self.fill([StoredSlice(name, slot, stored.shape, part, piece)])
                yield piece.reshape(-1)

    def stored(self, holding: StoredSlice) -> StoredTensor:
        """Return the stored tensor that `holding` is a slice of. Raises the ValueError of `fill`."""
        tensors, first = self.index.tensors, self.index.aliases.get(holding.name, holding.name)
        stored = tensors.get(holding.key) or tensors.get(f"{holding.slot}/{first}")
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
            expected = self.index.files[part.file]
            self._sources[part.file] = SourceFile(path, expected if expected.checksums else None, read_header(path))
        source = self._sources[part.file]
        entry = source.entries.get(part.entry)
        if entry is not None and (1, *entry.shape) == part.rectangle.sizes:  # a tensor of one of several fused experts
            entry = source.entries[part.entry] = dataclasses.replace(entry, shape=part.rectangle.sizes)
        if entry is None or entry.shape != part.rectangle.sizes:
            found = "none" if entry is None else f"one of shape {entry.shape}"
            wanted = f"an entry {part.entry!r} of shape {part.rectangle.sizes}"
            raise DamageError([Damage(str(source.path), wanted, found, (part.entry,))])
        return source


def load(folder: Path, *, needed: Callable[[CheckpointIndex], Iterable[StoredSlice]], world: World) -> CheckpointIndex:
    """Fill the slices that `needed(index)` returns for this rank, and return the index. Every rank calls it.

    Raises ValueError on every rank if one rank has a slice that cannot be loaded; then no slice is filled. Raises
    DamageError on every rank for damage or an OSError; some slices may then be filled."""
    index = on_all_ranks(lambda: read_index(folder), world=world)
    fill(index, needed=on_all_ranks(lambda: list(needed(index)), world=world), world=world)
    return index


def fill(index: CheckpointIndex, *, needed: Sequence[StoredSlice], world: World) -> None:
    """Fill the slices that this rank needs from a checkpoint. Every rank calls it. Raises the errors of `load`."""
    reader = CheckpointReader(index)
    on_all_ranks(lambda: [reader.stored(holding) for holding in needed], world=world)
    on_all_ranks(lambda: reader.fill(needed), world=world)


def on_all_ranks(act: Callable[[], _T], *, world: World) -> _T:
    """Return the result of `act` on this rank. Every rank calls it. If `act` fails on one rank, every rank raises.

    If `act` raises DamageError or OSError on any rank, raises DamageError with the damage of all ranks. Otherwise
    raises the first rank's ValueError. Any other error is raised on its own rank alone."""
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

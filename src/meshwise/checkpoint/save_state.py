"""Save a checkpoint: every rank writes its part, one rank publishes, and training continues meanwhile.

    | every rank            stage and write rank-N.safetensors, flush it, then rank-N.json: what it has written
    | the first rank        when all of these are there: checkpoint.json, flush, rename, `latest`

The ranks meet through the folder, not through collectives, because training uses the collectives meanwhile. They do so
with collectives again in `PendingSave.wait`, where every rank learns how it ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwise.checkpoint.checkpoint_errors import SaveError
from meshwise.checkpoint.checkpoint_folder import (
    make_aside,
    next_sequence,
    prune,
    publish,
    remove_quietly,
    write_flushed,
)
from meshwise.checkpoint.checkpoint_index import FORMAT, INDEX, StoredRectangle, file_row, parse_index, part_row
from meshwise.checkpoint.safetensors_format import TensorSpec, dtype_name, header
from meshwise.checkpoint.staged_write import CHUNK, STAGING, StagedWriter
from meshwise.comm.api.world import World
from meshwise.data_parallel.stored_slices import StoredSlice

_SHORTEST_NAP, _LONGEST_NAP = 0.001, 0.05
_PATIENCE_SECONDS = 20.0
"""How long the first rank still waits for the others' files when the training or the program around it has ended."""


@dataclass(frozen=True)
class SaveContent:
    """Content that this rank saves.

    holdings   over all ranks, every element of every logical tensor once
    aliases    other names of tied parameters
    extra      JSON values; those of the first rank count
    staging    bytes of the staging buffer
    """

    holdings: Iterable[StoredSlice]
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    staging: int = STAGING


def save(folder: Path, *, content: SaveContent, world: World, keep_last: int | None = None) -> PendingSave:
    """Begin to save; every rank calls it. With `keep_last`, older checkpoints beside it go once it is published.

    Returns when everything that may change before the next optimizer step is staged. Raises SaveError on every rank
    when one of them cannot begin: the folder cannot be made, or something cannot be kept in a checkpoint.
    """
    aside, share, problem = "", None, None
    try:
        share = RankFile.of(content, name=f"rank-{world.rank:05}.safetensors")
        aside = str(make_aside(folder)) if world.rank == 0 else ""
    except (ValueError, OSError) as error:
        problem = _said(error)
    began = world.exchange((aside, problem))
    aside = began[0][0]
    if problems := [f"rank {rank}: {what}" for rank, (_, what) in enumerate(began) if what is not None]:
        if world.rank == 0 and aside:
            remove_quietly(Path(aside))
        raise SaveError(f"{folder} was not saved: {'; '.join(problems)}")
    assert share is not None
    return PendingSave(share, content=content, where=(Path(aside), folder), world=world, keep_last=keep_last)


@dataclass(frozen=True)
class RankFile:
    """Part of a checkpoint that this rank writes: the file, its header, its tensors in order, and its part of the
    index.
    """

    name: str
    head: bytes
    tensors: Sequence[Tensor]
    waits: bool
    rows: Mapping[str, Any]

    @classmethod
    def of(cls, content: SaveContent, *, name: str) -> RankFile:
        """Return the file that this rank writes for `content`. Raises ValueError for content that a checkpoint cannot
        keep.
        """
        try:
            json.dumps(content.extra, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"what a checkpoint keeps besides tensors has to be JSON: {error}") from error
        held = list(content.holdings)
        # The widest elements first: then every tensor begins at a multiple of its element size.
        written = sorted((part for part in held if part.rectangle.numel), key=lambda part: -part.tensor.itemsize)
        unstable = sum(part.tensor.nbytes for part in written if not part.stable)
        return cls(
            name,
            header(
                [TensorSpec(_entry(part), part.tensor.dtype, tuple(part.tensor.shape)) for part in written], metadata={}
            ),
            [part.tensor if part.stable or unstable > CHUNK else part.tensor.clone() for part in written],
            unstable > CHUNK,
            _rows(held, name),
        )


class PendingSave:
    """A save under way on this rank."""

    def __init__(
        self, share: RankFile, *, content: SaveContent, where: tuple[Path, Path], world: World, keep_last: int | None
    ) -> None:
        self._aside, self.folder = where
        self._share = share
        self._content = content
        self._world = world
        self._keep_last = keep_last
        self._given_up = threading.Event()
        self._left = threading.Event()
        self._written = threading.Event()
        self._problem: str | None = None
        self._outcome: str | None = None
        self._finished = False
        path = self._aside / share.name
        self._stream = StagedWriter(path, head=share.head, tensors=share.tensors, staging=content.staging)
        self._thread = threading.Thread(target=self._run, name=f"save {self.folder.name}")
        self._thread.start()
        if share.waits:
            self.staged()

    def staged(self) -> None:
        """Return when the tensors that are being saved may change."""
        self._stream.staged()

    @property
    def done(self) -> bool:
        """True if this rank has nothing more to do but `wait`."""
        return not self._thread.is_alive()

    @property
    def told(self) -> bool:
        """True if `wait` has reported the end."""
        return self._finished

    def wait(self) -> Path:
        """Return the folder when it is published, or raise SaveError on every rank; every rank calls it.

        What was saved before is as it was when this fails. May be called again: the answer stays the same.
        """
        if not self._finished:
            self._written.wait()
            problems = self._agree(self._problem)
            if not problems:
                self._thread.join()
                problems = self._agree(self._outcome)
            self._problem = "; ".join(problems) or None
            if problems:
                if self._world.rank == 0:
                    self.give_up()
                    remove_quietly(self._aside)
                self._agree(None)  # what has failed is gone when the error is raised, on every rank
            self._finished = True
        if self._problem is not None:
            raise SaveError(f"{self.folder} was not saved: {self._problem}")
        return self.folder

    def leave(self) -> None:
        """Abandon the save: it is published only if the other ranks write their parts soon. Any rank, alone."""
        self._left.set()

    def give_up(self) -> None:
        """Stop waiting for other ranks: nothing will be published that is not published by now. Any rank, alone."""
        self._given_up.set()
        self._thread.join()

    def _agree(self, problem: str | None) -> list[str]:
        """Return the problems of all ranks; every rank calls it. When a rank is lost, this one gives up and raises what
        says so.
        """
        try:
            found = self._world.exchange(problem)
        except BaseException:
            self.give_up()
            raise
        return [f"rank {rank}: {what}" for rank, what in enumerate(found) if what is not None]

    # ---- on the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            file = self._stream.write()
            text = json.dumps({"files": {self._share.name: file_row(file)}, "tensors": self._share.rows})
            writing = self._aside / f"{self._share.name}.writing"
            write_flushed(writing, text=text)
            writing.replace(self._row(self._world.rank))
        except Exception as error:  # noqa: BLE001 - told by `wait`, on every rank
            self._problem = _said(error)
        finally:
            self._written.set()
        if self._world.rank == 0 and self._problem is None:
            try:
                self._publish()
            except Exception as error:  # noqa: BLE001 - told by `wait`, on every rank
                self._outcome = _said(error)

    def _publish(self) -> None:
        rows = [self._row(rank) for rank in range(self._world.size)]
        if not self._all_there(rows):
            self._outcome = "a rank did not write its part"
            return
        body = {
            "format": FORMAT,
            "sequence": next_sequence(self.folder.parent),
            **_merge(json.loads(row.read_text(encoding="utf-8")) for row in rows),
            "aliases": dict(self._content.aliases),
            "extra": dict(self._content.extra),
        }
        index = parse_index(self._aside, body=body)
        write_flushed(self._aside / INDEX, text=index.text())
        for row in rows:
            row.unlink()
        publish(self._aside, folder=self.folder)
        if self._keep_last is not None:
            # What cannot be removed now is tried again after the next save; this one is published all the same.
            with contextlib.suppress(OSError):
                prune(self.folder.parent, keep_last=self._keep_last)

    def _all_there(self, rows: Sequence[Path]) -> bool:
        """Wait for files of other ranks; False when there is no use in waiting longer."""
        left = [row for row in rows if not row.exists()]
        nap, deadline = _SHORTEST_NAP, math.inf
        while left:
            if self._given_up.wait(nap) or time.monotonic() > deadline:
                return False
            if deadline == math.inf and (self._left.is_set() or not threading.main_thread().is_alive()):
                deadline = time.monotonic() + _PATIENCE_SECONDS
            nap = min(2 * nap, _LONGEST_NAP)
            left = [row for row in left if not row.exists()]
        return True

    def _row(self, rank: int) -> Path:
        return self._aside / f"rank-{rank:05}.json"


def _entry(part: StoredSlice) -> str:
    """Return the name of a rectangle within its file."""
    return f"{part.key}@{','.join(map(str, part.rectangle.offsets))}"


def _rows(held: Iterable[StoredSlice], file: str) -> dict[str, Any]:
    """Return the rows of the index for what one rank holds."""
    rows: dict[str, Any] = {}
    for part in held:
        row = rows.setdefault(
            part.key, {"dtype": dtype_name(part.tensor.dtype), "shape": list(part.shape), "parts": []}
        )
        if part.rectangle.numel:
            row["parts"].append(part_row(StoredRectangle(file, _entry(part), part.rectangle)))
    return rows


def _merge(shares: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the files and tensors of all ranks. Raises ValueError when two of them saved one tensor as different
    ones.
    """
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for share in shares:
        files |= share["files"]
        for name, row in share["tensors"].items():
            known = tensors.setdefault(name, row | {"parts": []})
            if (known["dtype"], known["shape"]) != (row["dtype"], row["shape"]):
                raise ValueError(f"{name} is {known['dtype']} {known['shape']} and {row['dtype']} {row['shape']}")
            known["parts"] += row["parts"]
    return {"files": files, "tensors": tensors}


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"

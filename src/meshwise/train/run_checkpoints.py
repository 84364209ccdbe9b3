"""The checkpoints that a run writes as it goes.

A save is begun and left to itself; training goes on. That it is published is told as soon as rank 0 sees it. That it
failed all ranks have to learn alike, so it is told when the next one is due, or at the end: what was saved before is as
it was, and the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwise.checkpoint.checkpoint_errors import SaveError
from meshwise.checkpoint.checkpoint_index import INDEX
from meshwise.checkpoint.save_state import PendingSave
from meshwise.engine.trainer import Trainer
from meshwise.train.events import Event, Saved, SaveFailed


class RunCheckpoints:
    """Saves `trainer` into `root`/step-N; every rank calls every method but `look` together."""

    def __init__(self, trainer: Trainer, *, root: Path, keep_last: int, emit: Callable[[Event], None]) -> None:
        self._trainer = trainer
        self._root = root
        self._keep_last = keep_last
        self._emit = emit
        self._saving: PendingSave | None = None
        self._step = 0
        self._began = 0.0
        self._held = 0.0
        self._told = True
        self._failed: SaveError | None = None

    def save(self, step: int, *, extra: Mapping[str, Any]) -> None:
        """Begin to save the state after a step."""
        self._await()
        self._step, self._began, self._told = step, time.monotonic(), False
        try:
            self._saving = self._trainer.save(
                self._root / f"step-{step}", extra=extra, wait=False, keep_last=self._keep_last
            )
        except SaveError as error:
            self._fail(error)
        self._held = time.monotonic() - self._began

    def look(self) -> None:
        """Say that a save has been published, if it has been since the last look."""
        saving = self._saving
        if saving is not None and not self._told and saving.done and (saving.folder / INDEX).is_file():
            self._tell()

    def finish(self) -> None:
        """Wait for the save that is under way. Raises SaveError when the last one came to nothing."""
        self._await()
        if self._failed is not None:
            # Every rank raises here; none may end before rank 0 has said why and written what it can.
            self._trainer.world.barrier()
            raise self._failed

    def _await(self) -> None:
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            saving.wait()
        except SaveError as error:
            self._fail(error)
            return
        self._failed = None
        if not self._told:
            self._tell()

    def _tell(self) -> None:
        self._told = True
        path = str(self._root / f"step-{self._step}")
        self._emit(Saved(self._step, path, time.monotonic() - self._began, self._held))

    def _fail(self, error: SaveError) -> None:
        self._told, self._failed = True, error
        self._emit(SaveFailed(self._step, str(error)))

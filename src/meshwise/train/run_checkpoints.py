"""Write the checkpoints of a training run in the background, and report each as saved or failed.

`save` starts a save and returns, and training continues. Rank 0 emits `Saved` when the checkpoint is complete. All
ranks must learn of a failure at the same step, so `SaveFailed` is emitted at the next save or at the end of the run.
After a failure the older checkpoints are unchanged, and the run continues."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwise.checkpoint.checkpoint_errors import SaveError
from meshwise.checkpoint.checkpoint_index import INDEX
from meshwise.checkpoint.save_state import PendingSave
from meshwise.engine.trainer import Trainer
from meshwise.train.run_events import Event, Saved, SaveFailed


class RunCheckpoints:
    """Saves checkpoints of `trainer` into `root`/step-N. All ranks call `save` and `finish` at the same step."""

    def __init__(self, trainer: Trainer, *, root: Path, keep_last: int, emit: Callable[[Event], None]) -> None:
        self._trainer = trainer
        self._root = root
        self._keep_last = keep_last
        self._emit = emit
        self._saving: PendingSave | None = None
        self._step = 0
        self._began = 0.0
        self._held = 0.0
        self._reported = True
        self._failed: SaveError | None = None

    def save(self, step: int, *, extra: Mapping[str, Any]) -> None:
        """Wait for the previous save, then start to save the state after `step`, and `extra` (JSON values). If one of
        the two saves fails, `SaveFailed` is emitted and nothing is raised."""
        self._await()
        self._step, self._began, self._reported = step, time.monotonic(), False
        try:
            self._saving = self._trainer.save(
                self._root / f"step-{step}", extra=extra, wait=False, keep_last=self._keep_last
            )
        except SaveError as error:
            self._fail(error)
        self._held = time.monotonic() - self._began

    def report_published(self) -> None:
        """Emit `Saved` once, if the save in progress is complete; do nothing otherwise."""
        saving = self._saving
        if saving is not None and not self._reported and saving.done and (saving.folder / INDEX).is_file():
            self._report()

    def finish(self) -> None:
        """Wait for the save in progress. Raises SaveError if the last save failed."""
        self._await()
        if self._failed is not None:
            # Every rank raises here, but no rank may end the job before rank 0 has printed the reason.
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
        if not self._reported:
            self._report()

    def _report(self) -> None:
        self._reported = True
        path = str(self._root / f"step-{self._step}")
        self._emit(Saved(self._step, path, time.monotonic() - self._began, self._held))

    def _fail(self, error: SaveError) -> None:
        self._reported, self._failed = True, error
        self._emit(SaveFailed(self._step, str(error)))

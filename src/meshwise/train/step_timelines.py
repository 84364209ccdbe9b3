"""Some steps of a run, measured action by action, and kept in its folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from meshwise.engine.measure_steps import StepMeasurement, measure
from meshwise.engine.trainer import Trainer
from meshwise.train.events import Event, Measured

_WARMING_UP = 2
"""Steps at the start of a run that take longer than those to come."""


class StepTimelines:
    """Measures `count` steps after the first ones of a start, and tells of the one whose time is the median."""

    def __init__(self, trainer: Trainer, *, count: int, path: Path, emit: Callable[[Event], None]) -> None:
        self._trainer, self._count, self._path, self._emit = trainer, count, path, emit
        self._block = contextlib.ExitStack()
        self._measuring: StepMeasurement | None = None
        self._steps = range(0)

    def plan(self, first: int, *, last: int) -> None:
        """Choose the steps to measure, given the run's first and last step."""
        begin = max(first, min(first + _WARMING_UP, last - self._count + 1))
        self._steps = range(begin, min(begin + self._count, last + 1))

    def before(self, step: int) -> None:
        """Prepare for a step that is about to run."""
        if step == self._steps.start and self._steps:
            self._measuring = self._block.enter_context(measure(self._trainer))

    def after(self, step: int) -> None:
        """Finish a step that has run."""
        if self._measuring is None or step + 1 < self._steps.stop:
            return
        self._block.close()
        typical = self._measuring.typical()
        self._measuring = None
        assert typical is not None
        if self._trainer.world.rank == 0:
            typical.write(self._path)
        self._emit(Measured(step, len(self._steps), str(typical), str(self._path)))

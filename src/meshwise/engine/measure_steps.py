"""Measure how long the steps of a trainer take, on every rank, action by action.

    with measure(trainer) as measuring:
        for batch in batches:
            trainer.step(batch)
    print(measuring.steps()[-1])

The steps are brought together from all ranks, so every rank asks for them.
"""

import contextlib
from collections.abc import Iterator

from meshwise.comm.api.stopwatch import ActivityStopwatch
from meshwise.engine.trainer import Trainer
from meshwise.pipeline.run.measured_step import MeasuredStep, measured_step


class StepMeasurement:
    """Measurement of a trainer's steps on this rank."""

    def __init__(self, trainer: Trainer, *, watch: ActivityStopwatch) -> None:
        self._trainer, self._watch = trainer, watch

    def steps(self) -> list[MeasuredStep]:
        """Return the steps of all ranks, each with where its time went. Every rank calls it, after the block."""
        return measured_step(self._watch, world=self._trainer.world, schedule=self._trainer.schedule)

    def typical(self) -> MeasuredStep | None:
        """Return the step whose time is the median one; None when there was no step. Every rank calls it."""
        steps = sorted(self.steps(), key=lambda one: one.step.seconds)
        return steps[len(steps) // 2] if steps else None


@contextlib.contextmanager
def measure(trainer: Trainer) -> Iterator[StepMeasurement]:
    """Note when each rank does what in the steps that are made inside the block, on all ranks.

    A note is a reading of the clock, some dozens in a step; on a GPU an event of its stream, so that nothing waits.
    """
    with trainer.world.timed() as watch:
        yield StepMeasurement(trainer, watch=watch)

"""Measure how long the steps of a trainer take, on every rank, action by action; or profile a step (`profile`).

with measure(trainer) as measuring:
    for batch in batches:
        trainer.step(batch)
print(measuring.steps()[-1])"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from meshwise.comm.api.flight_recorder import ActivityStopwatch
from meshwise.engine.trainer import Trainer
from meshwise.pipeline.run.measured_step import MeasuredStep, measured_step


class StepMeasurement:
    """Measurement of the steps that a trainer ran in the block of `measure`."""

    def __init__(self, trainer: Trainer, *, watch: ActivityStopwatch) -> None:
        """`watch`: stopwatch that recorded this rank's activities."""
        self._trainer, self._watch = trainer, watch

    def steps(self) -> list[MeasuredStep]:
        """Return the measured steps, each with the actions of all ranks. Every rank calls it, after the block."""
        return measured_step(self._watch, world=self._trainer.world, schedule=self._trainer.schedule)

    def typical(self) -> MeasuredStep | None:
        """Return the step with the median time, or None without steps. Every rank calls it, after the block."""
        steps = sorted(self.steps(), key=lambda one: one.step.seconds)
        return steps[len(steps) // 2] if steps else None


@contextlib.contextmanager
def measure(trainer: Trainer) -> Iterator[StepMeasurement]:
    """Record the begin and end of each action of this rank in the steps inside the block. Every rank enters it.

    A record reads the clock, or on a GPU adds an event to the stream without waiting; a step has some dozens."""
    with trainer.world.timed() as watch:
        yield StepMeasurement(trainer, watch=watch)


@contextlib.contextmanager
def profile(trainer: Trainer, *, into: Path) -> Iterator[None]:
    """Write a Chrome trace of torch's profiler for the steps inside the block, to `into/rank-N.json` on each rank.

    Operations and kernels lie below ranges for the actions of the schedule (`0F3`) and the waits in collectives
    (`wait all_gather dp`). Profile one step after some others: the first steps allocate memory. In a process that
    Nsight Systems has started (`nsys profile …`), the ranges are NVTX ranges of its report, and no file is written."""
    with trainer.world.flight_recorder.profiled():
        if trainer.world.device.type == "cuda" and "NSYS_PROFILING_SESSION_ID" in os.environ:
            with torch.autograd.profiler.emit_nvtx():
                yield
            return
        into.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile() as trace:
            yield
            trainer.world.streams.synchronize()
    trace.export_chrome_trace(str(into / f"rank-{trainer.world.rank}.json"))

"""The learning rate over the steps of a run, as a function of the step (`rate`).

    1 ┤   ╭──╮               ╭───────────╮
      │  ╱    ╲  cosine     ╱             ╲  wsd
      │ ╱      ╲           ╱               ╲
floor ┤╱        ╰──       ╱                 ╲
      └ warm-up          warm-up  stable   decay

Cosine: Loshchilov and Hutter, *SGDR*, 2016, without restarts. WSD (warm-up, stable, decay): Hu et al., *MiniCPM*, 2024,
with a straight decay. The loop passes the number of updates, so a skipped step does not move the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from meshwise.train.job import ScheduleJob


def rate(schedule: ScheduleJob, *, steps: int) -> Callable[[int], float]:
    """Return a function from the step (0 … steps-1) to the fraction of the peak learning rate.

    Step k of the warm-up has (k+1)/warmup of the peak; the last step of the run has the floor.
    """
    decay = steps - schedule.warmup if schedule.shape != "wsd" else round(schedule.decay * steps)
    first = max(steps - decay, schedule.warmup)

    def at(step: int) -> float:
        if step < schedule.warmup:
            return (step + 1) / schedule.warmup
        if schedule.shape == "constant" or step < first:
            return 1.0
        progress = min(1.0, (step - first) / max(1, steps - 1 - first))
        height = (1 + math.cos(math.pi * progress)) / 2 if schedule.shape == "cosine" else 1 - progress
        return schedule.floor + (1 - schedule.floor) * height

    return at

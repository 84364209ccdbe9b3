"""The learning rate over a run, drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from meshwise.train.batch_and_lr import lr_schedule
from meshwise.train.job_settings import ScheduleJob


def drawn(steps: int, **schedule: Any) -> str:
    """The rate of every step in tenths of the peak."""
    at = lr_schedule(ScheduleJob(**schedule), steps=steps)
    return " ".join(f"{10 * at(step):.1f}".removesuffix(".0") for step in range(steps))


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ({"shape": "constant"}, "10 10 10 10 10 10 10 10 10 10 10"),
        ({"shape": "constant", "warmup": 4}, "2.5 5 7.5 10 10 10 10 10 10 10 10"),
        ({"shape": "linear", "floor": 0.0}, "10 9 8 7 6 5 4 3 2 1 0"),
        ({"shape": "linear", "floor": 0.2, "warmup": 2}, "5 10 10 9 8 7 6 5 4 3 2"),
        ({"shape": "cosine", "floor": 0.0}, "10 9.8 9 7.9 6.5 5 3.5 2.1 1.0 0.2 0"),
        ({"shape": "cosine", "floor": 1.0}, "10 10 10 10 10 10 10 10 10 10 10"),
        ({"shape": "wsd", "floor": 0.0, "warmup": 2, "decay": 0.46}, "5 10 10 10 10 10 10 7.5 5 2.5 0"),
        ({"shape": "wsd", "floor": 0.5, "decay": 0.28}, "10 10 10 10 10 10 10 10 10 7.5 5"),
        ({"shape": "wsd", "decay": 0.0}, "10 10 10 10 10 10 10 10 10 10 10"),
    ],
)
def test_the_rate_has_the_shape_that_was_asked_for(schedule: dict[str, Any], expected: str) -> None:
    assert drawn(11, **schedule).replace("1.0", "1") == expected.replace("1.0", "1")


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 100])
@pytest.mark.parametrize("warmup", [0, 1, 2, 200])
def test_the_rate_stays_between_zero_and_the_peak(shape: Any, steps: int, warmup: int) -> None:
    at = lr_schedule(ScheduleJob(shape=shape, warmup=warmup, floor=0.1), steps=steps)

    assert all(0 < at(step) <= 1 for step in range(steps + 1))


def test_torch_takes_the_rate_as_it_is() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = LambdaLR(optimizer, lr_schedule(ScheduleJob(shape="linear", warmup=2, floor=0.0), steps=4))
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()

    assert rates == [1.0, 2.0, 2.0, 0.0]

"""The loss scale as a table: what it is in each step of a run."""

import json
import math
from dataclasses import asdict

import pytest
import torch

from meshwise.precision.dtype_policy import LossScale, likely_count


def scales(events: str, scale: LossScale) -> list[float]:
    """The scale of each step; `.` is an update, `x` an overflow."""
    values = []
    for event in events.replace(" ", ""):
        values.append(scale.value)
        scale = scale.overflowed() if event == "x" else scale.updated()
    return values


@pytest.mark.parametrize(
    "events, patience, values",
    [
        ("x  x  x  .  .  x  .", 9, [64, 32, 8, 1, 1, 1, 0.5]),
        (".  .  .  .  .", 2, [64, 64, 128, 128, 256]),
        (".  x  .  .  .", 2, [64, 64, 32, 32, 64]),
    ],
)
def test_overflows_in_a_row_shrink_the_scale_faster_and_updates_let_it_grow(
    events: str, patience: int, values: list[float]
) -> None:
    assert scales(events, LossScale(64.0, patience=patience)) == values


def test_the_scale_stays_between_its_bounds() -> None:
    assert LossScale(LossScale.MOST, patience=1).updated().value == LossScale.MOST
    assert LossScale(LossScale.LEAST).exhausted
    assert not LossScale(LossScale.LEAST * 2).exhausted


def test_the_sum_is_multiplied_by_the_scale_over_a_power_of_two_near_its_count() -> None:
    scale = LossScale(2.0**16)
    assert scale.factor == 2.0**16
    assert [scale.expecting(count).factor for count in (1000, 1024, 1500, 3)] == [64, 64, 32, 2.0**14]
    assert scale.expecting(8).expecting(0).expecting(math.nan).factor == scale.expecting(8).factor
    assert scale.expecting(8).overflowed().factor == 2.0**12


def test_a_batch_is_taken_to_count_what_its_smallest_tensor_holds() -> None:
    images = {"pixels": torch.zeros(4, 3, 8, 8), "labels": torch.zeros(4), "temperature": torch.tensor(2.0)}
    assert likely_count(images) == 4
    assert likely_count((torch.zeros(4, 16), torch.zeros(4, 16))) == 64
    assert likely_count(torch.tensor(1.0)) == 0


def test_a_scale_goes_through_json() -> None:
    scale = LossScale(8.0, updates=3, overflows=1, patience=5, count=512.0)
    assert LossScale(**json.loads(json.dumps(asdict(scale)))) == scale


@pytest.mark.parametrize("value", [0.0, -2.0, math.nan, math.inf, 1000.0])
def test_a_scale_that_is_no_power_of_two_is_refused(value: float) -> None:
    """With 0, NaN or infinity no step would ever be applied."""
    with pytest.raises(ValueError, match=f"a loss scale of {value:g} is no power of two, and would round; give one"):
        LossScale(value)

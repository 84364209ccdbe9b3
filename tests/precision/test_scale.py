"""The loss scale as a table: what it is in each step of a run."""

import json

import pytest

from meshwise.precision.scale import Scale


def drawn(events: str, scale: Scale) -> list[float]:
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
    assert drawn(events, Scale(64.0, patience=patience)) == values


def test_the_scale_stays_between_its_bounds() -> None:
    assert Scale(Scale.MOST, patience=1).updated().value == Scale.MOST
    assert Scale(Scale.LEAST).exhausted
    assert not Scale(Scale.LEAST * 2).exhausted


def test_a_scale_goes_through_json() -> None:
    scale = Scale(8.0, updates=3, overflows=1, patience=5)
    assert Scale.restored(json.loads(json.dumps(scale.state()))) == scale

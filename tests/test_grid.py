"""Test that the part of a grid that `make test` runs has every pair of values, or every value, and `make grid` all."""

import itertools
from typing import Any

import pytest

from grid import Cell, Grid

AXES: dict[str, Any] = {"schedule": "abcdefghi", "pp": (2, 4), "model": range(5), "zero": range(4), "tp": (1, 2)}


def odd(cell: Cell) -> bool:
    return not (cell["tp"] == 2 and cell["model"] in (1, 2))


def pairs(cells: list[Cell]) -> set[Any]:
    return {pair for cell in cells for pair in itertools.combinations(cell.items(), 2)}


@pytest.mark.parametrize("grid", [Grid(AXES), Grid(AXES, exists=odd)])
def test_the_part_has_every_pair_of_the_whole_in_few_cells(grid: Grid) -> None:
    whole, part = grid.whole(), grid.part()
    assert pairs(part) == pairs(whole)
    assert 9 * 5 <= len(part) <= 1.3 * 9 * 5
    assert all(cell in whole for cell in part)


@pytest.mark.parametrize("grid", [Grid(AXES, strength=1), Grid(AXES, exists=odd, strength=1)])
def test_a_part_of_strength_1_has_every_value_in_no_more_cells_than_the_longest_axis_has_values(grid: Grid) -> None:
    part = grid.part()
    assert {value for cell in part for value in cell.items()} == {
        value for cell in grid.whole() for value in cell.items()
    }
    assert len(part) == 9
    assert all(cell in grid.whole() for cell in part)


def test_of_a_single_axis_the_part_has_every_value_and_of_the_others_every_pair() -> None:
    whole, part = Grid(AXES).whole(), Grid(AXES, single=("model", "zero")).part()
    others = {name: value for name, value in AXES.items() if name not in ("model", "zero")}
    assert pairs([{name: cell[name] for name in others} for cell in part]) == pairs(Grid(others).whole())
    assert {value for cell in part for value in cell.items()} == {value for cell in whole for value in cell.items()}
    assert len(part) < 1.3 * 9 * 2


def test_heavy_cells_are_in_the_whole_alone() -> None:
    grid = Grid(AXES, heavy=lambda cell: cell["pp"] * cell["tp"] > 4)
    assert {"pp": 4, "tp": 2} in [{"pp": cell["pp"], "tp": cell["tp"]} for cell in grid.whole()]
    assert pairs(grid.part()) == pairs(grid.whole()) - {(("pp", 4), ("tp", 2))}


def test_the_part_is_the_same_every_time() -> None:
    assert Grid(AXES).part() == Grid(AXES).part()


def test_expensive_cells_are_avoided_where_a_cheap_one_covers_as_much() -> None:
    axes = {"pp": (2, 4), "tp": (1, 2), "dp": (1, 2)}
    part = Grid(axes, cost=lambda cell: 10.0 ** (cell["pp"] * cell["tp"] * cell["dp"])).part()
    assert {"pp": 4, "tp": 2, "dp": 2} not in part


def test_cells_that_do_not_exist_are_in_neither() -> None:
    grid = Grid(AXES, exists=odd)
    assert len(grid.whole()) == 9 * 2 * 4 * (2 * 5 - 2)
    assert all(map(odd, grid.part()))


@pytest.mark.grid(Grid({"first": (1, 2), "second": ("a", "b")}))
def test_a_test_takes_an_argument_for_each_axis(first: int, second: str) -> None:
    assert (first, second) in itertools.product((1, 2), "ab")

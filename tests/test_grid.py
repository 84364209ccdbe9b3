"""Test that the part of a grid that `make test` runs has every pair of values, and `make grid` runs every cell."""

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
    whole, part = grid.whole(), grid.pairs()
    assert pairs(part) == pairs(whole)
    assert 9 * 5 <= len(part) <= 1.3 * 9 * 5
    assert all(cell in whole for cell in part)


def test_the_part_is_the_same_every_time() -> None:
    assert Grid(AXES).pairs() == Grid(AXES).pairs()


def test_expensive_cells_are_avoided_where_a_cheap_one_covers_as_much() -> None:
    axes = {"pp": (2, 4), "tp": (1, 2), "dp": (1, 2)}
    part = Grid(axes, cost=lambda cell: 10.0 ** (cell["pp"] * cell["tp"] * cell["dp"])).pairs()
    assert {"pp": 4, "tp": 2, "dp": 2} not in part


def test_cells_that_do_not_exist_are_in_neither() -> None:
    grid = Grid(AXES, exists=odd)
    assert len(grid.whole()) == 9 * 2 * 4 * (2 * 5 - 2)
    assert all(map(odd, grid.pairs()))


@pytest.mark.grid(Grid({"first": (1, 2), "second": ("a", "b")}))
def test_a_test_takes_an_argument_for_each_axis(first: int, second: str) -> None:
    assert (first, second) in itertools.product((1, 2), "ab")

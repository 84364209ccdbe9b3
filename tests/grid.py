"""Test grids: `make grid` runs every combination of values, `make test` a part that has each pair of values.

A promise about every schedule, ZeRO stage and degree has thousands of combinations. Most errors depend on one value or
on two values together. So the part has, for every two axes, every pair of values of the whole grid. The choice of cells
depends on the grid alone. A test names its grid and takes one argument for each axis:

    @pytest.mark.grid(Grid({"schedule": SCHEDULES, "pp": (2, 4), "zero": (0, 1, 2, 3)}))
    def test_…(schedule: str, pp: int, zero: int) -> None: …
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Cell: TypeAlias = dict[str, Any]
Pair: TypeAlias = tuple[str, Any, str, Any]

CANDIDATES = 50
"""Of so many cells the one with the most pairs that are still missing is taken next."""


@dataclass(frozen=True)
class Grid:
    """All combinations of the axes' values for which `exists` holds; values are told apart by their `repr`."""

    axes: Mapping[str, Sequence[Any]]

    exists: Callable[[Cell], bool] = field(default=lambda _cell: True)
    """Which combinations there are: one that is left out says nothing about its pairs."""

    cost: Callable[[Cell], float] = field(default=lambda _cell: 1.0)
    """What a cell takes, to any scale: of cells with as many missing pairs the cheaper one is taken."""

    def whole(self) -> list[Cell]:
        """Every cell, the first axis slowest."""
        product = itertools.product(*self.axes.values())
        return [cell for values in product if self.exists(cell := dict(zip(self.axes, values, strict=True)))]

    def pairs(self) -> list[Cell]:
        """Cells that have every pair of values that the whole grid has, few and cheap ones."""
        draw = random.Random(0)
        whole = self.whole()
        pairs, costs = [list(_pairs(cell)) for cell in whole], [self.cost(cell) for cell in whole]
        having: dict[Pair, list[int]] = {}
        for at in draw.sample(range(len(whole)), len(whole)):
            for pair in pairs[at]:
                having.setdefault(pair, []).append(at)
        missing = dict.fromkeys(having)
        chosen = []
        while missing:
            holders = having[min(missing, key=lambda pair: len(having[pair]))]
            candidates = holders if len(holders) <= CANDIDATES else draw.sample(holders, CANDIDATES)
            chosen.append(max(candidates, key=lambda at: sum(pair in missing for pair in pairs[at]) / costs[at]))
            for pair in pairs[chosen[-1]]:
                missing.pop(pair, None)
        return [whole[at] for at in sorted(chosen)]


def _pairs(cell: Cell) -> Iterator[Pair]:
    for (axis, value), (other, its) in itertools.combinations(cell.items(), 2):
        yield axis, repr(value), other, repr(its)


def name(cell: Cell) -> str:
    """A cell in one word."""
    return ",".join(f"{axis}={value}" for axis, value in cell.items())

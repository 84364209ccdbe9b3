"""Test grids: `make grid` runs every combination of values, `make test` a part that has each pair of values.

A promise about every schedule, ZeRO stage and degree has thousands of combinations. Most errors depend on one value or
on two values together. So the part has, for every two axes, every pair of values of the whole grid. Where cells are
expensive and other grids have the pairs, a grid of strength 1 asks for every value once; `single` names axes for which
the part does so. The choice of cells depends on the grid alone. A test names its grid and takes one argument for each
axis:

    @pytest.mark.grid(Grid({"schedule": SCHEDULES, "pp": (2, 4), "zero": (0, 1, 2, 3)}))
    def test_…(schedule: str, pp: int, zero: int) -> None: …"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from meshwise.plan import Plan, PlanError

Cell: TypeAlias = dict[str, Any]
Values: TypeAlias = tuple[tuple[str, str], ...]
"""Axes and the `repr` of their values: one of them, or two."""

CANDIDATES = 50
"""Of so many cells the one with the most values that are still missing is taken next."""


@dataclass(frozen=True)
class Grid:
    """All combinations of the axes' values for which `exists` holds; values are told apart by their `repr`."""

    axes: Mapping[str, Sequence[Any]]

    exists: Callable[[Cell], bool] = field(default=lambda _cell: True)
    """Which combinations there are: one that is left out says nothing about its pairs."""

    cost: Callable[[Cell], float] = field(default=lambda _cell: 1.0)
    """What a cell takes, to any scale: of cells with as many missing pairs the cheaper one is taken."""

    strength: int = 2
    """What the part has: 2 for every pair of values of two axes, 1 for every value of each axis."""

    single: Sequence[str] = ()
    """Axes of which the part has every value; their pairs are in other grids, and in the whole."""

    heavy: Callable[[Cell], bool] = field(default=lambda _cell: False)
    """Cells that only the whole has."""

    def whole(self) -> list[Cell]:
        """Every cell, the first axis slowest."""
        product = itertools.product(*self.axes.values())
        return [cell for values in product if self.exists(cell := dict(zip(self.axes, values, strict=True)))]

    def part(self) -> list[Cell]:
        """Few and cheap cells with every pair of values (every value at strength 1) of the cells that are not heavy."""
        draw = random.Random(0)
        whole = [cell for cell in self.whole() if not self.heavy(cell)]
        values, costs = [list(self._values(cell)) for cell in whole], [self.cost(cell) for cell in whole]
        having: dict[Values, list[int]] = {}
        for at in draw.sample(range(len(whole)), len(whole)):
            for some in values[at]:
                having.setdefault(some, []).append(at)
        missing = dict.fromkeys(having)
        chosen = []
        while missing:
            holders = having[min(missing, key=lambda some: len(having[some]))]
            candidates = holders if len(holders) <= CANDIDATES else draw.sample(holders, CANDIDATES)
            chosen.append(max(candidates, key=lambda at: sum(some in missing for some in values[at]) / costs[at]))
            for some in values[chosen[-1]]:
                missing.pop(some, None)
        return [whole[at] for at in sorted(chosen)]

    def _values(self, cell: Cell) -> Iterator[Values]:
        values = [(axis, repr(value)) for axis, value in cell.items()]
        yield from ((value,) for value in values)
        if self.strength == 2:
            yield from itertools.combinations([value for value in values if value[0] not in self.single], 2)


@functools.cache
def is_plan(text: str) -> bool:
    """Return whether the text is a plan that can work, for `exists`."""
    try:
        Plan.parse(text)
    except PlanError:
        return False
    return True


@functools.cache
def ranks_of(plan: str) -> int:
    """Return the number of ranks of a plan. Grids ask for the same few plans in thousands of cells."""
    return Plan.parse(plan).mesh().size


def name(cell: Cell) -> str:
    """A cell in one word."""
    return ",".join(f"{axis}={value}" for axis, value in cell.items())

"""Axes of a plan's mesh, grids of the ranks of tensor parallelism, and factorisations of a number of ranks."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "ep", "tp")
"""The axes of a plan's mesh, outermost first. tp communicates most, so its ranks are neighbours."""
REPLICAS = ("dp",)
"""Axes whose ranks hold replicas of a model, for different rows of the batch."""


@dataclass(frozen=True)
class TensorGrid:
    """Grid that the ranks of tensor parallelism form under one `tp_mode`.

    | axes    names of the grid's axes, outermost first; all have the same degree, except `depth`
    | power   number of axes of equal degree: tp = depth · degree ** power
    | needs   words before "ranks" that say how many ranks form such a grid
    | rows    axes whose ranks have different rows of the batch
    """

    axes: str
    power: int
    needs: str
    rows: tuple[str, ...]


GRIDS: Mapping[str, TensorGrid] = {
    "1d": TensorGrid("tp", 1, "any number of", ()),
    "2d": TensorGrid("row col", 2, "a square number of", ("row",)),
    "2.5d": TensorGrid("depth row col", 2, "tp_depth times a square number of", ("depth", "row")),
    "3d": TensorGrid("i j l", 3, "a cubic number of", ("i", "j")),
}
"""Grid of tp's ranks by `tp_mode`."""


def factorisations(number: int, *, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of `parts` positive integers whose product is `number`; the order of factors counts."""
    if parts == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in factorisations(number // first, parts=parts - 1):
            yield (first, *rest)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})

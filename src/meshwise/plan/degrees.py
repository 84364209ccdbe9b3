"""The arithmetic of degrees: the axes of a plan, what each `tp_mode` makes of tp's ranks, and which are near."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "ep", "tp")
"""The axes of a plan's mesh, outermost first: the most talkative axis, tp, joins neighbouring ranks."""
REPLICAS = ("dp",)
"""The axes whose ranks hold replicas of a model that differ in nothing but their rows of the batch."""


@dataclass(frozen=True)
class TensorGrid:
    """Shape of tp's ranks: axes of equal degree (except `depth`), some of them splitting the rows of the batch."""

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
"""What each `tp_mode` makes of the axis tp."""


def factorisations(number: int, *, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `number` as a product of `parts` ordered factors."""
    if parts == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in factorisations(number // first, parts=parts - 1):
            yield (first, *rest)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def distance(one: Mapping[str, int], *, other: Mapping[str, int]) -> float:
    """By which factors the degrees of two plans differ, as a sum of logarithms."""
    return sum(abs(math.log(one[axis] / other[axis])) for axis in AXES)

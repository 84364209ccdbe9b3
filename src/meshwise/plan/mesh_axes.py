"""Names of the axes of a plan's mesh, the grids of tp, and the mesh where ep, etp and shards divide dp, cp and tp."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwise.base.mesh import Mesh

AXES = ("pp", "dp", "cp", "tp")
"""The axes of a plan's mesh, outermost first. tp communicates most, so its ranks are neighbours."""
REPLICAS = ("dp",)
"""Axes whose ranks hold replicas of a model, for different rows of the batch."""


@dataclass(frozen=True)
class TensorGrid:
    """Grid that the ranks of tensor parallelism form under one `tp_mode`.

    | axes    names of the grid's axes, with spaces between, outermost first; all but `depth` have the same degree
    | power   number of axes of equal degree: tp = depth · degree ** power
    | needs   how many ranks form such a grid, in words before "ranks", for messages
    | rows    axes whose ranks have different rows of the batch"""

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


def folded_mesh(axes: Sequence[tuple[str, int]], *, ep: int, etp: int, shards: int, near: int) -> Mesh | None:
    """Return the mesh with `axes`, as (name, degree), and joint axes, which are names for several axes together.

    None if the degrees do not divide each other.

    In dp, `shards` innermost ranks divide one copy of the state, and `near` innermost ranks a second copy of the
    parameters (`hpz`).

    | etp     the innermost ranks of tp
    | ep      the ranks after those of etp, innermost first: of tp, then of cp, then of dp
    | node    the ranks of dp outside of `near` and inside of `shards`
    | outer   the ranks of dp outside of `shards`: replicas of the shards

    An axis that is taken in part is split into several axes, outermost first; its name becomes their joint axis:

        | dp=4 ep=2            dp_outer=2 dp_ep=2               dp = dp_outer dp_ep, ep = dp_ep
        | dp=2 tp=2 ep=4       dp=2 tp=2                        ep = dp tp
        | tp=8 ep=2 etp=2      tp_outer=2 tp_ep=2 tp_etp=2      tp = all three, ep = tp_ep, etp = tp_etp
        | dp=2x4 ep=2          dp_outer=2 dp_shard=2 dp_ep=2    outer = dp_outer, ep = dp_ep
        | dp=4x2 ep=4          dp_outer=2 dp_ep=2 dp_shard=2    outer = dp_outer dp_ep, ep = dp_ep dp_shard"""
    fine: list[tuple[str, int]] = []
    joint: dict[str, tuple[str, ...]] = {}
    missing = {"etp": etp, "ep": ep}
    taken: dict[str, tuple[str, ...]] = dict.fromkeys(("ep", "etp", "node", "outer"), ())
    for name, degree in reversed(axes):
        spans, size = dict[str, tuple[int, int]](), 1  # a part begins and ends after so many innermost ranks
        for key in missing if name == axes[-1][0] else ("ep",):
            share = math.gcd(degree // size, missing[key]) if name in AXES[1:] else 1
            missing[key] //= share
            spans[key] = (size, size := size * share)
            if share > 1 and size < degree and missing[key] > 1:
                return None
        if name in REPLICAS:
            spans |= {"shard": (1, near if near < degree else 1), "node": (near, shards), "outer": (shards, degree)}
        ends = sorted({1, degree, *(stop for start, stop in spans.values() if start < stop)})
        parts: list[tuple[str, int]] = []
        for low, high in itertools.pairwise(ends):
            if high % low:
                return None
            label = next((key for key, (start, stop) in spans.items() if start < stop == high), "outer")
            parts.insert(0, (f"{name}_{label}" if len(ends) > 2 else name, high // low))
            for key in taken.keys() & {key for key, (start, stop) in spans.items() if start <= low < stop}:
                taken[key] = (parts[0][0], *taken[key])
        if len(parts) > 1:
            joint[name] = tuple(part for part, _ in parts)
        fine = [*(parts or [(name, degree)]), *fine]
    if any(size > 1 for size in missing.values()):
        return None
    return Mesh(tuple(fine), joint=(*joint.items(), *taken.items()))


def factorisations(number: int, *, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of `parts` positive integers whose product is `number`; the order of factors counts."""
    if parts == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in factorisations(number // first, parts=parts - 1):
            yield (first, *rest)


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})

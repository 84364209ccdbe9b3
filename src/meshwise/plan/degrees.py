"""Axes of a plan's mesh, grids of the ranks of tensor parallelism, and factorisations of a number of ranks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwise.base.mesh import Mesh

AXES = ("pp", "dp", "cp", "tp")
"""The axes of a plan's mesh, outermost first. tp communicates most, so its ranks are neighbours."""
REPLICAS = ("dp",)
"""Axes whose ranks hold replicas of a model, for different rows of the batch."""
OUTER_REPLICAS = ("dp_outer",)
"""Axes whose ranks hold replicas of the shards; only with the key `shards`."""
NODES = ("dp_node",)
"""Axes whose ranks hold the same shard of the second copy; only with the key `hpz`."""


@dataclass(frozen=True)
class TensorGrid:
    """Grid that the ranks of tensor parallelism form under one `tp_mode`.

    | axes    names of the grid's axes, outermost first; all have the same degree, except `depth`
    | power   number of axes of equal degree: tp = depth · degree ** power
    | needs   words before "ranks" that say how many ranks form such a grid
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


def expert_mesh(axes: Sequence[tuple[str, int]], *, ep: int, etp: int) -> Mesh | None:
    """Return the mesh with `axes`, as (name, degree), and joint axes `ep` and `etp`; None if they do not divide `axes`.

    `etp` takes the innermost ranks of tp. `ep` takes the next ranks, innermost first: of tp, of cp, of dp. An axis that
    is taken in part is split into up to three axes, outermost first; its name then joins these axes:

        | dp=4 ep=2            dp_outer=2 dp_ep=2                        dp = dp_outer dp_ep, ep = dp_ep
        | dp=2 tp=2 ep=4       dp=2 tp=2                                 ep = dp tp
        | tp=8 ep=2 etp=2      tp_outer=2 tp_ep=2 tp_etp=2               tp = all three, ep = tp_ep, etp = tp_etp"""
    fine: list[tuple[str, int]] = []
    joint: dict[str, tuple[str, ...]] = {}
    missing = {"etp": etp, "ep": ep}
    taken: dict[str, tuple[str, ...]] = {"ep": (), "etp": ()}  # outermost first
    for name, degree in reversed(axes):
        parts: list[tuple[str, int]] = []
        for key in missing if name == axes[-1][0] else ("ep",):
            share = math.gcd(degree, missing[key])
            if name not in ("dp", "cp", "tp") or share == 1:
                continue
            if degree not in (share, 1) and missing[key] != share:
                return None
            missing[key], degree = missing[key] // share, degree // share
            parts.append((key, share))
        whole = len(parts) == 1 and degree == 1
        rest = [("outer", degree)] if degree > 1 and parts else []
        pieces = [(name if whole else f"{name}_{key}", size) for key, size in (*rest, *reversed(parts))]
        for (key, _), (piece, _) in zip(reversed(parts), pieces[len(rest) :], strict=True):
            taken[key] = (piece, *taken[key])
        if parts and not whole:
            joint[name] = tuple(piece for piece, _ in pieces)
        fine = [*(pieces or [(name, degree)]), *fine]
    if any(size > 1 for size in missing.values()):
        return None
    return Mesh(tuple(fine), joint=(*joint.items(), *taken.items()))


def shard_mesh(mesh: Mesh, *, shards: int, near: int) -> Mesh:
    """Return `mesh` with `dp` as a joint axis of `dp_outer`, `dp_node` and `dp_shard`; the first two only if above 1.

    `shards` neighbours along `dp_node dp_shard` divide one copy of the state among them. `near` neighbours along
    `dp_shard` divide one second copy of the parameters. Ranks along `dp_outer` are replicas."""
    axes: list[tuple[str, int]] = []
    for name, degree in mesh.axes:
        parts = ((OUTER_REPLICAS[0], degree // shards), (NODES[0], shards // near))
        fine = (*(part for part in parts if part[1] > 1), ("dp_shard", near))
        axes += fine if name in REPLICAS else [(name, degree)]
    names = tuple(name for name, _ in axes if name.startswith("dp_"))
    return Mesh(tuple(axes), joint=(*mesh.joint, (REPLICAS[0], names)))


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

"""Whether a model's parts fit the ranks of a plan, and which plans are near that do."""

from __future__ import annotations

import math
from collections.abc import Iterable

from meshwise.plan import Plan, PlanError
from meshwise.tensor.families.pair import Attention
from meshwise.tensor.schemes import scheme


def refuse_misfits(attentions: Iterable[Attention], *, plan: Plan) -> None:
    """Raise PlanError when an attention has no head for some of the ranks that split them, cannot share them out, or
    would take the number of its tokens from a part of them.
    """
    degree = inner_degree(plan)
    for attention in attentions:
        if plan.sequence_parallel and not attention.enters_whole:
            raise PlanError(
                f"{attention.name} reads its input in a way that does not show which sizes it takes from it, and "
                f"'{plan}' gives it a part of the tokens. Nearest that works: sequence_parallel=0"
            )
        if fits(attention, degree=degree):
            continue
        heads = attention.heads
        works = [other for other in range(1, max(heads.count, degree) + 1) if fits(attention, degree=other)]
        near = sorted(sorted(works, key=lambda other: abs(math.log(other / degree)))[:2])
        plans = " or ".join(f"tp={_ranks(plan, other)}" for other in near)
        why = "they cannot be shared out evenly" if heads.key_count >= degree else "they are fewer"
        raise PlanError(
            f"{attention.name} has {heads.count} heads over {heads.key_count} key heads, and '{plan}' shares them out "
            f"over {degree} ranks: {why}. Nearest that works: {plans}"
        )


def fits(attention: Attention, *, degree: int) -> bool:
    """Whether `degree` ranks can share out the heads, each getting whole groups of queries with their key."""
    keys = attention.heads.key_count
    return keys % degree == 0 if attention.even else keys >= degree


def inner_degree(plan: Plan) -> int:
    """How many ranks share out the heads under a plan."""
    mesh = plan.mesh()
    return math.prod(mesh.degree(axis) for axis in scheme(plan, blocks=True).inner)


def _ranks(plan: Plan, side: int) -> int:
    power = {"1d": 1, "2d": 2, "2.5d": 2, "3d": 3}[plan.tp_mode]
    return int(side**power) * (plan.tp_depth if plan.tp_mode == "2.5d" else 1)

"""Compute how a plan shares the contents of a pair."""

import math
from dataclasses import dataclass

from meshwise.plan import Plan
from meshwise.tensor.schemes import scheme


@dataclass(frozen=True)
class PairSharing:
    """Sharing of an attention under a plan."""

    ranks: int
    """How many ranks share out the heads."""
    rows_stay: bool
    """Whether what a pair has inside are the rows of its input. Under 3d they are not: so its input cannot be gathered
    for all its linears at once, and no axis of the heads can be cut in two, as it splits rows elsewhere."""

    @classmethod
    def of(cls, plan: Plan) -> "PairSharing":
        """Return how a plan shares attention. Raises ValueError for a plan with `dp=auto`."""
        mesh = plan.mesh()
        ranks = math.prod(mesh.degree(axis) for axis in scheme(plan, blocks=True).inner)
        return cls(ranks, rows_stay=plan.tp_mode != "3d")

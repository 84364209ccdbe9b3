"""Layouts and collectives of the schemes 1D, 2D, 2.5D and 3D of tensor parallelism, as data."""

import dataclasses

from meshwise.plan import Plan
from meshwise.tensor.core.scheme import Scheme
from meshwise.tensor.schemes.one_d import one_d
from meshwise.tensor.schemes.three_d import three_d
from meshwise.tensor.schemes.two_d import two_d

__all__ = ["one_d", "scheme", "three_d", "two_d"]


def scheme(plan: Plan, *, blocks: bool) -> Scheme:
    """Return the scheme of a plan inside (`blocks`) or outside of the blocks; tokens are split inside only."""
    if plan.tp_mode == "1d":
        chosen = one_d(sequence=blocks and plan.sequence_parallel == 1)
    elif plan.tp_mode == "3d":
        chosen = three_d()
    else:
        chosen = two_d(rows=("row",) if plan.tp_mode == "2d" else ("depth", "row"))
    return dataclasses.replace(chosen, replicas=plan.replica_axes)

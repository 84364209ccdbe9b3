"""Plans: the user's choice of how to split a model over ranks, as one value (`Plan`)."""

from meshwise.plan.mesh_axes import AXES
from meshwise.plan.plan import Plan
from meshwise.plan.plan_keys import PlanError

__all__ = ["AXES", "Plan", "PlanError"]

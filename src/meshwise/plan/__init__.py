"""Plan: the user's choices about splitting, its keys, and the combinations that are refused."""

from meshwise.plan.degrees import AXES
from meshwise.plan.plan import Plan
from meshwise.plan.plan_keys import PlanError

__all__ = ["AXES", "Plan", "PlanError"]

"""What the user chose about splitting: the value, its keys, and what cannot work together."""

from meshwise.plan.degrees import AXES
from meshwise.plan.plan import Plan
from meshwise.plan.plan_keys import PlanError

__all__ = ["AXES", "Plan", "PlanError"]

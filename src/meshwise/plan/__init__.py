"""What the user chose about splitting: the value, its keys, and what cannot work together."""

from meshwise.plan.degrees import AXES
from meshwise.plan.keys import PlanError
from meshwise.plan.plan import Plan

__all__ = ["AXES", "Plan", "PlanError"]

"""Train one plain PyTorch model on many devices, and prove that the split model is the same model."""

from meshwise.layout import Layout
from meshwise.mesh import Mesh
from meshwise.plan import Plan, PlanError

__all__ = [
    "Layout",
    "Mesh",
    "Plan",
    "PlanError",
]

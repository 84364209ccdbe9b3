"""Train one plain PyTorch model on many devices, and prove that the split model is the same model."""

from meshwise.comm import RankLostError, RanksDisagree, World, connect, run
from meshwise.layout import Layout
from meshwise.measure import measure
from meshwise.mesh import Mesh
from meshwise.nonfinite import NonFiniteError
from meshwise.parallelize import Options, parallelize
from meshwise.plan import Plan, PlanError
from meshwise.result import EvalResult, StepResult
from meshwise.simulate.shortage import needs
from meshwise.trainer import Trainer
from meshwise.verify import Report, verify

__all__ = [
    "EvalResult",
    "Layout",
    "Mesh",
    "NonFiniteError",
    "Options",
    "Plan",
    "PlanError",
    "RankLostError",
    "RanksDisagree",
    "Report",
    "StepResult",
    "Trainer",
    "World",
    "connect",
    "measure",
    "needs",
    "parallelize",
    "run",
    "verify",
]

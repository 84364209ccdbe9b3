"""Train one plain PyTorch model on many devices, and prove that the split model is the same model."""

from meshwise.base.mesh import Mesh
from meshwise.comm import RankLostError, RanksDisagree, World, connect, run
from meshwise.engine.measure_steps import measure
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.step_result import EvalResult, NonFiniteError, StepResult
from meshwise.engine.trainer import Trainer
from meshwise.layout import Layout
from meshwise.plan import Plan, PlanError
from meshwise.simulate.memory_shortage import needs
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

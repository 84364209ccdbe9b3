"""Train one plain PyTorch model on many devices, and prove that the split model is the same model."""

from meshwise.base import __version__
from meshwise.base.mesh import Mesh
from meshwise.checkpoint.checkpoint_format import DamageError, SaveError
from meshwise.checkpoint.dcp_conversion import export_dcp, import_dcp
from meshwise.checkpoint.hugging_face import ExportError, export
from meshwise.checkpoint.save_state import PendingSave
from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.launcher_info import RankLostError
from meshwise.comm.api.world import World
from meshwise.comm.launch.connect import connect
from meshwise.comm.launch.launch import run
from meshwise.engine.open_step import OpenStep
from meshwise.engine.parallelize import Options, parallelize
from meshwise.engine.parameter_average import ParameterAverage
from meshwise.engine.step_result import EvalResult, NonFiniteError, StepResult
from meshwise.engine.trainer import Trainer, measure
from meshwise.layout.layout import Layout
from meshwise.memory.swap_file import SwapConfig
from meshwise.model.forward import LossError
from meshwise.pipeline.cut.model_cut import CutOptions
from meshwise.plan import Plan, PlanError
from meshwise.precision.dtype_policy import LossScale
from meshwise.simulate.predicted_memory import needs
from meshwise.sync.remote_module import RemoteModule, remote
from meshwise.verify import Report, verify

__all__ = [
    "CutOptions",
    "DamageError",
    "EvalResult",
    "ExportError",
    "Layout",
    "LossError",
    "LossScale",
    "Mesh",
    "NonFiniteError",
    "OpenStep",
    "Options",
    "ParameterAverage",
    "PendingSave",
    "Plan",
    "PlanError",
    "RankLostError",
    "RanksDisagree",
    "RemoteModule",
    "Report",
    "SaveError",
    "StepResult",
    "SwapConfig",
    "Trainer",
    "World",
    "__version__",
    "connect",
    "export",
    "export_dcp",
    "import_dcp",
    "measure",
    "needs",
    "parallelize",
    "remote",
    "run",
    "verify",
]

"""Build an engine with its optimizer and checkpoints by hand, for settings that no key of a plan selects."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from meshwise.checkpoint.training_state import TrainingState
from meshwise.comm.api.world import World
from meshwise.data_parallel.bucket import StorageConfig
from meshwise.data_parallel.data_parallel_engine import DataParallel
from meshwise.data_parallel.gradient_reduction import Reduction
from meshwise.data_parallel.stage_engines import Engine
from meshwise.engine.step import StepAfterBackward
from meshwise.memory.chunked_update import ChunkedUpdate
from meshwise.memory.tiers import Tiers
from meshwise.model.deferred_init import ParameterSource
from meshwise.model.parameter_table import ParameterTable
from meshwise.optim.build_optimizer import build_optimizer
from meshwise.plan import Plan


@dataclass
class HandMade:
    """The training of `module` over `world` as `table` says."""

    module: nn.Module
    table: ParameterTable
    world: World
    reduction: Reduction
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        source = ParameterSource(self.module, record=None)
        storage = StorageConfig(self.reduction, tiers=Tiers(streams=self.world.streams))
        self._stage = DataParallel(source, table=self.table, world=self.world, storage=storage)
        self.engine = Engine({0: self._stage}, ranks=[0], world=self.world)
        groups = [{"params": owned, **dict(options)} for options, owned in self.engine.slices().items()]
        optimizer = build_optimizer(torch.optim.SGD, groups=groups, lr=0.1, momentum=0.9)
        chunks = [chunk for bucket in self.engine.buckets for chunk in bucket.chunks]
        self.update = ChunkedUpdate(optimizer, chunks=chunks, tiers=self.engine.tiers)
        self.timing = StepAfterBackward(self.engine, update=self.update)
        self.state = TrainingState(self.engine, update=self.update, plan=Plan())

    def step(self, loss: Tensor) -> float:
        """Train on the sum of all ranks' losses; return the squared norm of its gradient."""
        self._stage.begin_step()
        self.timing.begin()
        self._stage.backward(loss, last=True)
        squared = self.engine.squared_norm()
        self.world.all_reduce(squared, axes=self.world.mesh.names).wait()
        self.timing.apply(1.0)
        return float(squared)

    def save(self, folder: Path) -> None:
        """Save, and wait for it."""
        self.state.save(folder, extra={}).wait()

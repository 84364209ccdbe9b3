"""A model in stages: each stored and reduced by a `DataParallel` of its own, all run by the pipeline's interpreter."""

from meshwise.staged.engine import StagedEngine
from meshwise.staged.keeper import LiveStage
from meshwise.staged.sweep import StagedSweep

__all__ = ["LiveStage", "StagedEngine", "StagedSweep"]

"""Optimizers over the flat slices that a rank owns, from torch and for whole matrices.

| Muon         orthogonal updates of matrices       | LARS, LAMB   a rate for each layer, for large batches
| Several      several optimizers at once           | parameter_rule   options by pattern, depth and kind"""

from meshwise.optim.layerwise_rates import LAMB, LARS
from meshwise.optim.muon import Muon
from meshwise.optim.parameter_rules import parameter_rule
from meshwise.optim.several import Several

__all__ = ["LAMB", "LARS", "Muon", "Several", "parameter_rule"]

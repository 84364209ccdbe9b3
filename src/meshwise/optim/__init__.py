"""Optimizers over the flat slices that a rank owns, from torch and for whole matrices.

| Muon         orthogonal updates of matrices       | LARS, LAMB   a rate for each layer, for large batches
| Several      several optimizers at once           | parameter_rule   options by pattern, depth and kind
| whole        any class on whole tensors: whole(torch.optim.Adafactor)
| OneBitAdam, OneBitLAMB, ZeroOneAdam               replicas exchange momenta as signs"""

from meshwise.optim.large_batch_optimizers import LAMB, LARS, Muon
from meshwise.optim.one_bit_optimizers import OneBitAdam, OneBitLAMB, ZeroOneAdam
from meshwise.optim.parameter_rules import Several, parameter_rule
from meshwise.optim.whole_tensors import whole

__all__ = ["LAMB", "LARS", "Muon", "OneBitAdam", "OneBitLAMB", "Several", "ZeroOneAdam", "parameter_rule", "whole"]

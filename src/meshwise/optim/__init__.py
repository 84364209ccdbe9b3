"""Optimizers over the flat slices that a rank owns, and for whole matrices; docs/large_batch.md has a table of them."""

from meshwise.optim.lars_lamb_muon import LAMB, LARS, Muon
from meshwise.optim.one_bit_optimizers import OneBitAdam, OneBitLAMB, ZeroOneAdam
from meshwise.optim.parameter_rules import Several, parameter_rule
from meshwise.optim.whole_tensors import whole

__all__ = ["LAMB", "LARS", "Muon", "OneBitAdam", "OneBitLAMB", "Several", "ZeroOneAdam", "parameter_rule", "whole"]

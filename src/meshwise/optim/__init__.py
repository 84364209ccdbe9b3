"""Optimizers over the flat slices that a rank owns; `model/logical_tensors.py` serves those that need more."""

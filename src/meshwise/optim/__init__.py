"""Optimizers over the flat slices that a rank owns."""

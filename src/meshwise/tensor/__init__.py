"""Tensor parallelism: `detect` finds the part of each module, `schemes` has the layouts, `core` computes on shards."""

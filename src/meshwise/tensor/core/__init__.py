"""Computation of a split model on one rank: the sharded matmul, sharded modules, and the resharding between them."""

"""Tensor parallelism: one sharded matmul, a page of layouts for each scheme, modules that play a part in them."""

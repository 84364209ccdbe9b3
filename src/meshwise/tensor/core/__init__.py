"""What runs a split model: the sharded matmul, modules on this rank's part, and the resharding between them."""

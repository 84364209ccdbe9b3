"""The running split model: the sharded matmul, modules on this rank's part, the resharding between them."""

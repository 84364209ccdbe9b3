"""Data parallelism: each rank runs its own rows of the batch; ZeRO 0 to 3 shards gradients, updates and parameters."""

"""Detection of the role that each module of a plain model has in tensor parallelism, such as matrix or norm."""

"""One training step of a model under a plan: `parallelize`, the trainer, micro-batches, pipeline stages."""

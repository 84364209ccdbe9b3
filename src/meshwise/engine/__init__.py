"""Put a model under a plan (`parallelize`) and run it (`Trainer`): steps, evaluation, micro-batches, stages."""

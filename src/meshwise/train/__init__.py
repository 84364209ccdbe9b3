"""The training loop around a trainer: the job, its data, its events."""

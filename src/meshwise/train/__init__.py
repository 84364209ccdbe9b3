"""The training loop of a job: its settings, its data, its events, its checkpoints and its folder."""

"""Run a training job: settings, data, training loop, progress output, checkpoints and the folder of the run."""

"""Save the state of a training under one plan, and load it under any other plan (docs/checkpoints.md)."""

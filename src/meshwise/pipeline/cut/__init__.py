"""The cut of a model into stages: watched on an example, balanced, and kept as a value."""

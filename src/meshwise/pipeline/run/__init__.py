"""The run of a pipeline: stages made from a model, the interpreter of schedules, and the measurement of a step."""

"""Run a pipeline: make stages from a model, execute a schedule's actions, and measure a step."""

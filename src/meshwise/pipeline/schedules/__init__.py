"""The schedules by name: what each needs, and the function that returns its table."""

from meshwise.pipeline.schedules.named import SCHEDULES, Recipe, make_schedule, planned_schedule, read_schedule

__all__ = ["SCHEDULES", "Recipe", "make_schedule", "planned_schedule", "read_schedule"]

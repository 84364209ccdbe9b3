"""The schedules by name: what each needs, and the function that returns its table."""

from meshwise.pipeline.schedules.named import SCHEDULES, NamedSchedule, make_schedule, planned_schedule, read_schedule

__all__ = [
    "SCHEDULES",
    "NamedSchedule",
    "make_schedule",
    "planned_schedule",
    "read_schedule",
]

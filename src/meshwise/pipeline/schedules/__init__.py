"""Pipeline schedules as tables of actions: build them by name, read them from a file, check them, and time them."""

from meshwise.pipeline.schedules.by_name import SCHEDULES, NamedSchedule, make_schedule, planned_schedule, read_schedule

__all__ = [
    "SCHEDULES",
    "NamedSchedule",
    "make_schedule",
    "planned_schedule",
    "read_schedule",
]

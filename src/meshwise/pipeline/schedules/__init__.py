"""Schedules as tables: built by name, read from a file, checked, completed for a run, and timed."""

from meshwise.pipeline.schedules.schedule_by_name import (
    SCHEDULES,
    NamedSchedule,
    make_schedule,
    planned_schedule,
    read_schedule,
)

__all__ = [
    "SCHEDULES",
    "NamedSchedule",
    "make_schedule",
    "planned_schedule",
    "read_schedule",
]

"""`meshwise draw schedule`: a pipeline schedule in the terminal, as a picture, and as a trace."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.cli.drawing_output import DrawingFiles, check, drawing_board, save
from meshwise.pipeline.schedules import planned_schedule, read_schedule
from meshwise.pipeline.schedules.action import Schedule
from meshwise.pipeline.schedules.passes import lower
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock, peaks
from meshwise.plan import Plan
from meshwise.plan.plan_keys import keys_of
from meshwise.plan.plan_text import check_keys, read_words
from meshwise.train.flags import parse_flags
from meshwise.train.job import JobError
from meshwise.view.plan_account import PlanAccount
from meshwise.view.schedule_text import figures, picture

_MOST = 100_000
"""Forwards of a schedule: minutes of drawing, and more than a picture shows."""

_LONGEST = 1e100
"""Of times: sums and ratios of them are numbers."""


@dataclass(frozen=True)
class DrawSchedule(DrawingFiles):
    """Draw when each rank computes what, for a plan's schedule or a table of your own."""

    plan: str = ""
    """The plan, of which pp, microbatches, schedule, virtual_stages and zero are read."""

    table: Path | None = None
    """A table instead: a text file with one row of actions per rank, as in `0F0 0F1 0B0 0B1`."""

    forward: float = 1.0
    """Time of a stage's forward."""

    input: float = 1.0
    """Time of its backward for the input."""

    weight: float = 1.0
    """Time of its backward for the weights; a whole backward takes both."""

    link: float = 0.0
    """Time for what a stage sends to arrive."""

    actions: bool = False
    """Print the table as well, with all that a run would do: sends, receives, gathers, reductions."""


def main(words: Sequence[str]) -> int:
    """Draw what the words name. Raises JobError for a schedule that cannot work, before anything is drawn."""
    flags = parse_flags(words, prog="meshwise draw schedule", default=DrawSchedule())
    if (flags.table is None) == (not flags.plan):
        raise JobError('give either a plan or a table: meshwise draw schedule --plan "pp=4 microbatches=8"')
    times = (flags.forward, flags.input, flags.weight)
    if not (all(0 < time <= _LONGEST for time in times) and 0 <= flags.link <= _LONGEST):
        raise JobError("times are positive, and a link's at least 0; they are numbers, and none is above 1e100")
    plan = plan_words(flags.plan)
    if not flags.table and plan["pp"] * plan["microbatches"] * (plan["virtual_stages"] or 1) > _MOST:
        raise JobError(f"'{flags.plan}' is more than {_MOST} forwards; give fewer stages or microbatches to draw")
    check(flags)
    with _uncollected():
        try:
            schedule = read_schedule(flags.table) if flags.table else _of_plan(plan)
            lowered = lower(schedule, zero=plan["zero"])
        except OSError as error:
            raise JobError(f"{flags.table} cannot be read: {error.strerror}; name a text file") from error
        except ValueError as error:
            raise JobError(str(error)) from error
        _draw(flags, lowered, title=flags.table.name if flags.table else flags.plan)
    return 0


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection within the block: nearly all objects of a large schedule stay, and collecting takes
    half of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def plan_words(text: str) -> dict[str, Any]:
    """Return the keys of a plan, the default where it names none, without asking whether the plan as a whole can run.

    Raises PlanError for a word that is not key=value, an unknown key, and a value that is none of its key.
    """
    keys, given = keys_of(Plan), read_words(text)
    check_keys(given, known=keys)
    values: dict[str, Any] = {item.name: item.default for item in dataclasses.fields(Plan)} | {"virtual_stages": None}
    for key, value in given.items():
        values[key] = keys[key].read(value)
        keys[key].check(values[key], name=key)
    return values


def _of_plan(plan: dict[str, Any]) -> Schedule:
    return planned_schedule(
        plan["schedule"], pp=plan["pp"], microbatches=plan["microbatches"], virtual_stages=plan["virtual_stages"]
    )


def _draw(flags: DrawSchedule, lowered: Schedule, *, title: str) -> None:
    console = drawing_board()
    costs = ActionCost(flags.forward, flags.input, flags.weight, link=flags.link)
    timeline = clock(lowered, costs=costs)
    console.show(picture(timeline, width=console.width))
    console.print()
    console.show(figures(timeline, peaks=peaks(lowered, costs=costs)))
    if flags.actions:
        console.print(f"\n{lowered}", highlight=False, soft_wrap=True)
    save([PlanAccount(title, timeline, unit="")], files=flags, title=title)

"""Build a schedule from its name in a plan, or read a table from a file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwise.pipeline.schedules.action import Schedule, ScheduleError
from meshwise.pipeline.schedules.classic_schedules import gpipe, interleaved, looped, naive, one_forward_one_backward
from meshwise.pipeline.schedules.passes import send_first
from meshwise.pipeline.schedules.validate import validate
from meshwise.pipeline.schedules.zero_bubble import dualpipev, zb_h1, zb_h2, zb_v
from meshwise.plan.plan_keys import is_path, plan_notation


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule that a plan can name: the function that builds it, and the numbers with which it works."""

    build: Callable[[int, int, int], Schedule]
    """`build(pp, microbatches, virtual_stages)` returns the table."""
    virtual: tuple[int, int | None]
    """Smallest and largest number of stages per rank; None: no largest."""
    least: Callable[[int], int] = lambda _pp: 1
    """`least(pp)` is the smallest number of micro-batches."""
    step: Callable[[int], int] = lambda _pp: 1
    """The number of micro-batches has to be a multiple of `step(pp)`."""
    overlaps: bool = True
    """True if several ranks compute at the same time, so that `passes.send_first` gains."""

    def nearest(self, pp: int, *, microbatches: int, virtual_stages: int) -> tuple[int, int]:
        """Return the nearest (microbatches, virtual_stages) with which this schedule works."""
        least, most = self.virtual
        step = self.step(pp)
        fewer = microbatches // step * step
        multiple = fewer if microbatches - fewer < fewer + step - microbatches else fewer + step
        wanted = microbatches if fewer == microbatches else multiple
        return max(self.least(pp), wanted), max(least, min(virtual_stages, most or virtual_stages))


SCHEDULES: Mapping[str, NamedSchedule] = {
    "naive": NamedSchedule(lambda pp, m, _v: naive(pp, microbatches=m), (1, 1), overlaps=False),
    "gpipe": NamedSchedule(lambda pp, m, _v: gpipe(pp, microbatches=m), (1, 1)),
    "1f1b": NamedSchedule(lambda pp, m, _v: one_forward_one_backward(pp, microbatches=m), (1, 1)),
    "interleaved": NamedSchedule(
        lambda pp, m, v: interleaved(pp, microbatches=m, virtual_stages=v),
        (2, None),
        least=lambda pp: pp,
        step=lambda pp: pp,
    ),
    "looped": NamedSchedule(lambda pp, m, v: looped(pp, microbatches=m, virtual_stages=v), (2, None)),
    "zb-h1": NamedSchedule(lambda pp, m, _v: zb_h1(pp, microbatches=m), (1, 1)),
    "zb-h2": NamedSchedule(lambda pp, m, _v: zb_h2(pp, microbatches=m), (1, 1)),
    "zb-v": NamedSchedule(lambda pp, m, _v: zb_v(pp, microbatches=m), (2, 2), least=lambda pp: 2 * pp),
    "dualpipev": NamedSchedule(lambda pp, m, _v: dualpipev(pp, microbatches=m), (2, 2), least=lambda pp: 2 * pp),
}


def make_schedule(name: str, *, pp: int, microbatches: int, virtual_stages: int | None = None) -> Schedule:
    """Return the table of a schedule. `virtual_stages`: stages per rank; None: the fewest with which it works.

    A name with a `/` or a `.` is the path of a file with a table, which must be for these numbers.

    Raises ScheduleError for an unknown name, and for a table that cannot be read or cannot run. If the schedule does
    not work with these numbers, it raises ScheduleError with the nearest numbers that work."""
    if is_path(name):
        return _from_file(name, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages)
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; the schedules are {' '.join(SCHEDULES)}")
    named = SCHEDULES[name]
    virtual = named.virtual[0] if virtual_stages is None else virtual_stages
    if min(pp, microbatches, virtual) < 1:
        raise ScheduleError(f"pp={pp} microbatches={microbatches} virtual_stages={virtual}: each is at least 1")
    works = named.nearest(pp, microbatches=microbatches, virtual_stages=virtual)
    if works != (microbatches, virtual):
        raise ScheduleError(_refusal(name, pp, given=(microbatches, virtual), works=works))
    return named.build(pp, microbatches, virtual)


def planned_schedule(name: str, *, pp: int, microbatches: int, virtual_stages: int | None = None) -> Schedule:
    """Return the table that a plan runs: the result of `make_schedule`, changed by `passes.send_first`.

    Tables from files and schedules without overlap are not changed. Raises ScheduleError as `make_schedule` does."""
    schedule = make_schedule(name, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages)
    return schedule if is_path(name) or not SCHEDULES[name].overlaps else send_first(schedule)


def _refusal(name: str, pp: int, *, given: tuple[int, int], works: tuple[int, int]) -> str:
    named = SCHEDULES[name]
    needs = []
    if given[0] != works[0]:
        step, least = named.step(pp), named.least(pp)
        needs.append(f"a multiple of pp={pp} micro-batches" if step > 1 else f"at least {least} micro-batches")
    if given[1] != works[1]:
        least, most = named.virtual
        needs.append(f"virtual_stages={least}" if least == most else f"at least virtual_stages={least}")
    return (
        f"schedule={name} with pp={pp} needs {' and '.join(needs)}, not microbatches={given[0]} virtual_stages="
        f"{given[1]}. Nearest that works: 'pp={pp} microbatches={works[0]} virtual_stages={works[1]} schedule={name}'"
    )


def _from_file(path: str, *, pp: int, microbatches: int, virtual_stages: int | None) -> Schedule:
    """Return the table of a file. Raises ScheduleError if it is for other numbers."""
    try:
        schedule = read_schedule(Path(path))
    except OSError as error:
        raise ScheduleError(f"schedule={path} cannot be read: {error.strerror}") from None
    virtual = max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))
    given = (pp, microbatches, virtual if virtual_stages is None else virtual_stages)
    if given != (schedule.ranks, schedule.microbatches, virtual):
        raise ScheduleError(
            f"the table in {path} is not for pp={pp} microbatches={microbatches} virtual_stages={given[2]}. Nearest "
            f"that works: 'pp={schedule.ranks} microbatches={schedule.microbatches} virtual_stages={virtual} "
            f"schedule={plan_notation(path)}'"
        )
    return schedule


def read_schedule(path: Path) -> Schedule:
    """Return the checked table in a file with one line of actions per rank (see `Schedule.parse`).

    Raises OSError when the file cannot be read, and ScheduleError, with the path, for a table that cannot run."""
    try:
        schedule = Schedule.parse(path.read_text(encoding="utf-8"))
        validate(schedule)
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path} is not text, but a table of actions is: {error}") from None
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return schedule

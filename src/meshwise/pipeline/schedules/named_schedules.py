"""Build a schedule from its name in a plan, or read a table from a file.

A schedule is a table of actions, one row per rank. `make_schedule` builds it, `planned_schedule` the one that a plan
runs. docs/pipeline.md has the bubbles and the memory of all schedules. p: number of ranks. v: stages per rank. f, i and
w: times of the actions F (forward), I (input gradient) and W (weight gradient).

In the classic schedules (naive, GPipe, 1F1B, interleaved, looped) a backward is one action. They differ in the number
of forwards before the first backward, and in the order in which a rank runs its stages (`_alternating`).

In the zero-bubble schedules a backward is I, run at once because the stage before waits for it, and W, run later. zb-h1
and zb-h2 (Qi et al., 2023) differ only in two limits (`_greedy`). zb-v (Qi et al., 2024) and dualpipev (DeepSeek, 2025)
put stages r and 2p - 1 - r on rank r (a V). So the loss is on rank 0. The rule of zb-h1 would leave gaps in a V, so the
two are written as phases of repeated actions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwise.pipeline.schedules.schedule_table import Action, ActionKind, Schedule, ScheduleError, send_first, validate
from meshwise.plan.plan_keys import is_path, plan_notation


def naive(pp: int, *, microbatches: int) -> Schedule:
    """Return the schedule without overlap: one micro-batch at a time runs through all stages and back."""
    order = [(0, index) for index in range(microbatches)]
    return _alternating(pp, order, laps=1, ahead=[0] * pp)


def gpipe(pp: int, *, microbatches: int) -> Schedule:
    """Return the GPipe schedule (Huang et al., 2019): all forwards, then all backwards."""
    return looped(pp, microbatches=microbatches, virtual_stages=1)


def one_forward_one_backward(pp: int, *, microbatches: int) -> Schedule:
    """Return the 1F1B schedule: rank r first runs p - r - 1 forwards, then alternates (Narayanan et al., 2019)."""
    order = [(0, index) for index in range(microbatches)]
    return _alternating(pp, order, laps=1, ahead=[pp - rank - 1 for rank in range(pp)])


def interleaved(pp: int, *, microbatches: int, virtual_stages: int) -> Schedule:
    """Return interleaved 1F1B: stage s is on rank s mod p. Groups of p micro-batches pass through all ranks v times.

    `microbatches` has to be a multiple of `pp` (Narayanan et al., 2021)."""
    starts = range(0, microbatches, pp)
    order = [(lap, start + index) for start in starts for lap in range(virtual_stages) for index in range(pp)]
    ahead = [2 * (pp - rank - 1) + (virtual_stages - 1) * pp for rank in range(pp)]
    return _alternating(pp, order, laps=virtual_stages, ahead=ahead)


def looped(pp: int, *, microbatches: int, virtual_stages: int) -> Schedule:
    """Return the breadth-first schedule (Lamy-Poirier, 2023): a rank runs all forwards of a stage in a row."""
    order = [(lap, index) for lap in range(virtual_stages) for index in range(microbatches)]
    return _alternating(pp, order, laps=virtual_stages, ahead=[len(order)] * pp)


def _alternating(pp: int, order: Sequence[tuple[int, int]], *, laps: int, ahead: Sequence[int]) -> Schedule:
    """Return the table in which rank r runs `ahead[r]` forwards before it alternates with backwards.

    `order`: a rank's forwards, as (lap, micro-batch): lap l runs stage l·p + rank. Backwards reverse the laps."""
    rows = []
    for rank, first in enumerate(min(each, len(order)) for each in ahead):
        forwards = [Action(lap * pp + rank, ActionKind.F, index) for lap, index in order]
        backwards = [Action((laps - 1 - lap) * pp + rank, ActionKind.B, index) for lap, index in order]
        turns = [action for pair in zip(forwards[first:], backwards, strict=False) for action in pair]
        rows.append((*forwards[:first], *turns, *backwards[len(forwards) - first :]))
    return Schedule(tuple(rows))


def zb_h1(pp: int, *, microbatches: int) -> Schedule:
    """Return the ZB-H1 schedule: the memory of 1F1B with a third of its bubble."""
    return _greedy(microbatches, ahead=[pp - rank for rank in range(pp)], most=pp)


def zb_h2(pp: int, *, microbatches: int) -> Schedule:
    """Return the ZB-H2 schedule: no bubble between a rank's first and last action, for about twice the memory."""
    return _greedy(microbatches, ahead=[2 * (pp - rank) - 1 for rank in range(pp)], most=2 * pp - 1)


def _greedy(microbatches: int, *, ahead: Sequence[int], most: int) -> Schedule:
    """Return the schedule in which every rank runs, in each unit of time, the first allowed action of F, I and W.

    A rank has at most `most` micro-batches between F and W; its forwards are at most `ahead[rank]` ahead of its I."""
    ranks = range(len(ahead))
    rows: list[list[Action]] = [[] for _ in ranks]
    done = [dict.fromkeys((ActionKind.F, ActionKind.I, ActionKind.W), 0) for _ in ranks]
    while any(rank[ActionKind.W] < microbatches for rank in done):
        before = [dict(rank) for rank in done]
        for rank in ranks:
            f, i, w = done[rank].values()
            received = before[rank - 1][ActionKind.F] if rank > 0 else microbatches
            returned = before[rank + 1][ActionKind.I] if rank + 1 < len(ahead) else microbatches
            if f < received and f - w < most and f - i < ahead[rank]:
                kind = ActionKind.F
            elif i < min(f, returned):
                kind = ActionKind.I
            elif w < i:
                kind = ActionKind.W
            else:
                continue
            rows[rank].append(Action(rank, kind, done[rank][kind]))
            done[rank][kind] += 1
    return Schedule(tuple(map(tuple, rows)))


def zb_v(pp: int, *, microbatches: int) -> Schedule:
    """Return the ZB-V schedule for at least 2p micro-batches: the memory of 1F1B, no bubble if F, I and W are equal."""
    rows = [_Row(rank, 2 * pp - 1 - rank) for rank in range(pp)]
    for rank, row in enumerate(rows):
        row.add("F0", times=2 * (pp - rank) - 1)
        row.add("F1 F0", times=rank)
        row.add("F1 I1 W1", times=pp - rank)
        row.add("F0 I0 W0 F1 I1 W1", times=microbatches - 2 * pp + rank + 1)
        row.add("I0 W0 F1 I1 W1", times=pp - rank - 1)
        row.add("I0 I1", times=rank)
        row.add("I0 W0", times=pp - rank)
        row.add("W1", times=rank)
        row.add("W0", times=rank)
    return Schedule(tuple(tuple(row.actions) for row in rows))


def dualpipev(pp: int, *, microbatches: int) -> Schedule:
    """Return DualPipeV, half of a DualPipe, for at least 2p micro-batches; the phases follow DeepSeek's `dualpipev.py`.

    It alternates forwards and backwards in pairs, so that their communication could overlap."""
    rows = [_Row(rank, 2 * pp - 1 - rank) for rank in range(pp)]
    for rank, row in enumerate(rows):
        after = pp - rank - 1
        row.add("F0", times=2 * after)
        row.add("F0 F1", times=rank + 1)
        row.add("I1 W1 F1", times=after)
        row.add("F0 B1 F1 B0", times=microbatches - 2 * pp + rank + 1)
        row.add("B1 F1 B0", times=after)
        row.add("B1 B0", times=(rank + 1) // 2)
        row.add("B1 I0" if rank % 2 == 0 else "I1 I0", times=1)
        row.add("I1 I0", times=(rank + 1) // 2 - rank % 2)
        row.add("W I0", times=after)
        row.add("W", times=rank + 1)
    return Schedule(tuple(tuple(row.actions) for row in rows))


class _Row:
    """Builder of one rank's row. `add("F1")`: next forward of its second stage; `W`: its oldest pending W."""

    def __init__(self, *stages: int) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._next: dict[tuple[int, ActionKind], int] = {}
        self._left: list[Action] = []

    def add(self, words: str, *, times: int) -> None:
        """Append the actions of these words, repeated `times` times."""
        for word in words.split() * times:
            kind, stage = ActionKind(word[0]), self._stages[int(word[1:] or 0)]
            if kind is ActionKind.W:
                weight = next(action for action in self._left if word == "W" or action.stage == stage)
                self._left.remove(weight)
                self.actions.append(weight)
                continue
            counted = (stage, ActionKind.F if kind is ActionKind.F else ActionKind.B)
            index = self._next.get(counted, 0)
            self._next[counted] = index + 1
            self.actions.append(Action(stage, kind, index))
            if kind is ActionKind.I:
                self._left.append(Action(stage, ActionKind.W, index))


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule that a plan can name: the function that builds it, and the numbers with which it works."""

    build: Callable[..., Schedule]
    """`build(pp, microbatches=…)` returns the table; with `virtual_stages=…` too, if their number is not fixed."""
    virtual: tuple[int, int | None]
    """Smallest and largest number of stages per rank; None: no largest."""
    least: Callable[[int], int] = lambda _pp: 1
    """`least(pp)` is the smallest number of micro-batches."""
    multiple: Callable[[int], int] = lambda _pp: 1
    """The number of micro-batches has to be a multiple of `multiple(pp)`."""
    overlaps: bool = True
    """True if several ranks compute at the same time; then `send_first` shortens the bubble."""

    def nearest(self, pp: int, *, microbatches: int, virtual_stages: int) -> tuple[int, int]:
        """Return the nearest (microbatches, virtual_stages) with which this schedule works."""
        least, most = self.virtual
        step = self.multiple(pp)
        fewer = microbatches // step * step
        multiple = fewer if microbatches - fewer < fewer + step - microbatches else fewer + step
        return max(self.least(pp), multiple), max(least, min(virtual_stages, most or virtual_stages))


SCHEDULES: Mapping[str, NamedSchedule] = {
    "naive": NamedSchedule(naive, (1, 1), overlaps=False),
    "gpipe": NamedSchedule(gpipe, (1, 1)),
    "1f1b": NamedSchedule(one_forward_one_backward, (1, 1)),
    "interleaved": NamedSchedule(interleaved, (2, None), least=lambda pp: pp, multiple=lambda pp: pp),
    "looped": NamedSchedule(looped, (2, None)),
    "zb-h1": NamedSchedule(zb_h1, (1, 1)),
    "zb-h2": NamedSchedule(zb_h2, (1, 1)),
    "zb-v": NamedSchedule(zb_v, (2, 2), least=lambda pp: 2 * pp),
    "dualpipev": NamedSchedule(dualpipev, (2, 2), least=lambda pp: 2 * pp),
}


def make_schedule(name: str, *, pp: int, microbatches: int, virtual_stages: int | None = None) -> Schedule:
    """Return the table of a schedule. `virtual_stages`: stages per rank; None: the fewest that work, or the file's.

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
        needs = []
        if microbatches != works[0]:
            step, least = named.multiple(pp), named.least(pp)
            needs.append(f"a multiple of pp={pp} micro-batches" if step > 1 else f"at least {least} micro-batches")
        if virtual != works[1]:
            least, most = named.virtual
            needs.append(f"virtual_stages={least}" if least == most else f"at least virtual_stages={least}")
        raise ScheduleError(
            f"schedule={name} with pp={pp} needs {' and '.join(needs)}, not microbatches={microbatches} "
            f"virtual_stages={virtual}. Nearest that works: 'pp={pp} microbatches={works[0]} "
            f"virtual_stages={works[1]} schedule={name}'"
        )
    choice = {"virtual_stages": virtual} if named.virtual[1] is None else {}
    return named.build(pp, microbatches=microbatches, **choice)


def planned_schedule(name: str, *, pp: int, microbatches: int, virtual_stages: int | None = None) -> Schedule:
    """Return the table that a plan runs: as `make_schedule`, but with I and W for each late B (`send_first`).

    Tables from files and schedules without overlap are not changed. Raises ScheduleError as `make_schedule` does."""
    schedule = make_schedule(name, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages)
    return schedule if is_path(name) or not SCHEDULES[name].overlaps else send_first(schedule)


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
        raise ScheduleError(f"{path} must be a UTF-8 table of actions: {error}") from None
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return schedule

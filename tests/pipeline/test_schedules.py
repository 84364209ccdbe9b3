"""Schedules as drawn tables, their bubbles as published, and what they refuse."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwise.pipeline.schedules.named_schedules import SCHEDULES, make_schedule, read_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock
from meshwise.pipeline.schedules.schedule_table import (
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    in_flight,
    peaks,
    validate,
)

DRAWN = {
    "naive": """
        0F0 .   .   0B0 0F1 .   .   0B1
        .   1F0 1B0 .   .   1F1 1B1 .
    """,
    "gpipe": """
        0F0 0F1 0F2 .   .   .   .   0B0 0B1 0B2
        .   1F0 1F1 1F2 .   .   1B0 1B1 1B2 .
        .   .   2F0 2F1 2F2 2B0 2B1 2B2 .   .
    """,
    "1f1b": """
        0F0 0F1 0F2 .   .   0B0 0F3 0B1 .   0B2 .   0B3
        .   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 .   1B3 .
        .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 .   .
    """,
    "interleaved": """
        0F0 0F1 2F0 2F1 0F2 .   2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 .   0B2 0B3
        .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .   .   .
    """,
    "looped": """
        0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1
        .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 .
    """,
    "zb-h1": """
        0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """,
    "zb-h2": """
        0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4
        .   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4
        .   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
    """,
    "zb-v": """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """,
    "dualpipev": """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """,
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_schedule_is_the_table_drawn_here(name: str) -> None:
    drawn = Schedule.parse(DRAWN[name])
    assert str(make_schedule(name, pp=drawn.ranks, microbatches=drawn.microbatches)) == str(drawn)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "looped", "zb-h1", "zb-h2"])
def test_the_clock_times_the_drawn_table(name: str) -> None:
    """With everything as long as a forward (so half of a whole backward), the columns of a drawing are times."""
    whole = ActionCost(1, 0.5, 0.5) if name[:2] != "zb" else ActionCost(1, 1, 1)
    columns = [row.split() for row in DRAWN[name].strip().splitlines()]
    events = [event for event in clock(Schedule.parse(DRAWN[name]), costs=whole).events if event.kind in "FBIW"]
    assert all(columns[event.rank][round(event.start)] == str(event) for event in events)


def grid(name: str, *, least: int = 1) -> Iterator[tuple[int, int, int, Schedule]]:
    """(pp, micro-batches, stages a rank, table) over stages 2 to 8 and up to 32 micro-batches, `least`·pp at least."""
    recipe = SCHEDULES[name]
    fewest, most = recipe.virtual
    for pp in range(2, 9):
        for microbatches in sorted({1, 3, pp, 2 * pp - 1, 2 * pp, 32}):
            for virtual in {fewest, most or 2 * fewest}:
                works = recipe.nearest(pp, microbatches=microbatches, virtual_stages=virtual)
                if works == (microbatches, virtual) and least * pp <= microbatches <= 32:
                    table = make_schedule(name, pp=pp, microbatches=microbatches, virtual_stages=virtual)
                    yield pp, microbatches, virtual, table


BUBBLES = {
    # name: (micro-batches per rank from which the formula holds, the published formula over p, m, f, i, w)
    "naive": (0, "(p - 1) * m * (f + i + w)"),
    "gpipe": (0, "(p - 1) * (f + i + w)"),
    "1f1b": (0, "(p - 1) * (f + i + w)"),
    "interleaved": (1, "(p - 1) * (f + i + w)"),
    "looped": (1, "(p - 1) * (f + i + w)"),
    "zb-h1": (1, "(p - 1) * (f + i - w)"),
    "zb-h2": (2, "(p - 1) * (f + i - 2 * w)"),
    "zb-v": (2, "0"),
    "dualpipev": (2, "(p - 1) * (f + i - w)"),
}


def evaluated(formula: str, **values: float) -> float:
    return float(eval(formula, {"min": min, **values}))


@pytest.mark.parametrize("name", BUBBLES)
def test_the_bubble_is_the_published_one_under_equal_costs(name: str) -> None:
    least, formula = BUBBLES[name]
    for pp, microbatches, _, table in grid(name, least=least):
        assert max(clock(table).idle) == evaluated(formula, p=pp, m=microbatches, f=1, i=1, w=1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped", "zb-h1", "zb-h2"])
def test_the_formula_holds_for_other_costs_as_well(name: str) -> None:
    formula = BUBBLES[name][1]
    for pp, microbatches in ((2, 4), (3, 9), (4, 12)):
        timing = clock(make_schedule(name, pp=pp, microbatches=microbatches), costs=ActionCost(1, 1.25, 0.75))
        assert max(timing.idle) == pytest.approx(evaluated(formula, p=pp, m=microbatches, f=1, i=1.25, w=0.75))


PEAKS = {
    "naive": "1",
    "gpipe": "m",
    "1f1b": "min(m, p)",
    "interleaved": "min(m * v, 2 * (p - 1) + (v - 1) * p + 1)",
    "looped": "m * v",
    "zb-h1": "min(m, p)",
    "zb-h2": "min(m, 2 * p - 1)",
    "zb-v": "2 * p",
    "dualpipev": "2 * p + 1",
}


@pytest.mark.parametrize("name", PEAKS)
def test_every_table_is_complete_ordered_free_of_deadlock_and_holds_the_published_number(name: str) -> None:
    for pp, microbatches, virtual, table in grid(name):
        assert (table.ranks, table.microbatches, table.stages) == (pp, microbatches, pp * virtual)
        validate(table)
        assert max(peaks(table)) == evaluated(PEAKS[name], p=pp, m=microbatches, v=virtual)


def test_rank_r_of_1f1b_keeps_p_minus_r_micro_batches() -> None:
    assert peaks(make_schedule("1f1b", pp=4, microbatches=9)) == (4, 3, 2, 1)


def test_in_flight_counts_micro_batches_per_stage() -> None:
    assert in_flight(make_schedule("1f1b", pp=4, microbatches=9)) == (4, 3, 2, 1)
    assert in_flight(make_schedule("looped", pp=2, microbatches=3, virtual_stages=2)) == (3, 3, 3, 3)


def test_stages_of_a_v_turn_round_at_the_last_rank() -> None:
    assert make_schedule("zb-v", pp=3, microbatches=6).rank_of == (0, 1, 2, 2, 1, 0)
    assert make_schedule("interleaved", pp=3, microbatches=6).rank_of == (0, 1, 2, 0, 1, 2)


REFUSED = [
    ("interleaved", 4, 6, 2, "a multiple of pp=4 micro-batches", "microbatches=8"),
    ("interleaved", 4, 2, 2, "a multiple of pp=4 micro-batches", "microbatches=4"),
    ("interleaved", 4, 9, 2, "a multiple of pp=4 micro-batches", "microbatches=8"),
    ("interleaved", 4, 8, 1, "at least virtual_stages=2", "virtual_stages=2"),
    ("looped", 4, 8, 1, "at least virtual_stages=2", "virtual_stages=2"),
    ("1f1b", 4, 8, 2, "virtual_stages=1", "virtual_stages=1"),
    ("zb-v", 4, 7, 2, "at least 8 micro-batches", "microbatches=8"),
    ("zb-v", 4, 7, 3, "at least 8 micro-batches and virtual_stages=2", "microbatches=8 virtual_stages=2"),
    ("dualpipev", 2, 3, 2, "at least 4 micro-batches", "microbatches=4"),
]


@pytest.mark.parametrize("name, pp, microbatches, virtual, needs, nearest", REFUSED)
def test_a_refusal_names_the_nearest_that_works(
    name: str, pp: int, microbatches: int, virtual: int, needs: str, nearest: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule(name, pp=pp, microbatches=microbatches, virtual_stages=virtual)
    assert needs in str(caught.value)
    assert nearest in str(caught.value).partition("Nearest that works: ")[2]


def test_the_error_for_an_unknown_schedule_names_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match=r"unknown schedule 'zb'.*zb-h1"):
        make_schedule("zb", pp=2, microbatches=2)


def test_no_micro_batches_and_no_ranks_are_refused() -> None:
    with pytest.raises(ScheduleError, match="each is at least 1"):
        make_schedule("1f1b", pp=0, microbatches=2)
    with pytest.raises(ScheduleError, match="each is at least 1"):
        make_schedule("1f1b", pp=2, microbatches=0)


# ---- the table as a value ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2F0", "0B13", "1SEND_F3", "1RECV_B3", "10I2", "0W0", "3GATHER", "3FREE", "0REDUCE"])
def test_an_action_prints_as_it_is_parsed(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["F0", "2F", "2X0", "2GATHER1", "2SEND_F", "-1F0", "2F0 ", "2f0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


def test_a_schedule_prints_as_it_is_parsed() -> None:
    table = make_schedule("zb-v", pp=3, microbatches=7)
    assert Schedule.parse(str(table)) == table
    assert table.splits_backward
    assert Action(0, ActionKind.F, 6) in table.actions()


def test_a_table_of_the_users_own_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("# two ranks\n0F0 0F1 . 0B0 0B1\n\n. 1F0 1B0 1F1 1B1  # the last\n")
    table = read_schedule(path)
    assert str(table) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def test_the_error_for_a_faulty_file_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("0F0 0B0\n\n1F0 1G0\n")
    with pytest.raises(ScheduleError, match=r"mine.txt: line 3: '1G0' is not an action"):
        read_schedule(path)
    path.write_text("0F0 0B0\n1F0\n")
    with pytest.raises(ScheduleError, match=r"mine.txt: rank 1 has no backward for stage 1, micro-batch 0"):
        read_schedule(path)
    path.write_text("0F0 0B0 0REDUCE\n")
    with pytest.raises(ScheduleError, match=r"mine.txt: 0REDUCE is added when the table is run; write F, B, I and W"):
        read_schedule(path)
    path.write_text("# nothing\n")
    with pytest.raises(ScheduleError, match="the table is empty"):
        read_schedule(path)

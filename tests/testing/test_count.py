import pytest

from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.testing import count


def record(kind: str, *axes: str, size: int) -> CallRecord:
    return CallRecord(0, kind, axes, (size // 4,), "float32", size, "here")


STAMPS = [
    record("all_gather", "dp", size=400),
    record("all_reduce", "dp", size=8),
    record("all_gather", "dp", size=1200),
    record("all_reduce", "dp", "tp", size=4),
]


def test_calls_and_bytes_are_summed_by_kind_and_axes() -> None:
    expected = {"all_gather[dp]": (2, 1600), "all_reduce[dp]": (1, 8), "all_reduce[dp·tp]": (1, 4)}
    assert count(STAMPS) == expected
    count(STAMPS).check(expected)


def test_nothing_called_is_an_empty_table() -> None:
    assert count([]) == {}
    count([]).check({})


def test_counts_print_as_a_table() -> None:
    assert repr(count(STAMPS)).splitlines() == [
        "                   calls  bytes",
        "all_gather[dp]         2  1,600",
        "all_reduce[dp]         1      8",
        "all_reduce[dp·tp]      1      4",
    ]


@pytest.mark.parametrize(
    "expected",
    [
        {"all_gather[dp]": (2, 1600)},
        {"all_gather[dp]": (2, 1601), "all_reduce[dp]": (1, 8), "all_reduce[dp·tp]": (1, 4)},
        {"all_gather[dp]": (2, 1600), "all_reduce[dp]": (1, 8), "all_reduce[dp·tp]": (1, 4), "send[pp]": (1, 1)},
    ],
)
def test_a_missing_an_extra_and_a_wrong_row_each_fail(expected: dict[str, tuple[int, int]]) -> None:
    with pytest.raises(AssertionError):
        count(STAMPS).check(expected)


def test_a_mismatch_shows_both_tables_and_points_at_the_rows_that_differ() -> None:
    with pytest.raises(AssertionError) as caught:
        count(STAMPS).check({"all_gather[dp]": (2, 1600), "all_reduce[dp]": (1, 4), "send[pp]": (3, 12)})
    assert str(caught.value).splitlines() == [
        "the collectives are not the expected ones",
        "                   calls  expected  bytes  expected",
        "all_gather[dp]         2         2  1,600     1,600",
        "all_reduce[dp]         1         1      8         4  ←",
        "all_reduce[dp·tp]      1         0      4         0  ←",
        "send[pp]               0         3      0        12  ←",
    ]

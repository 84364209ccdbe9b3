"""Time to bandwidth, as nccl-tests defines it."""

import pytest

from meshwise.bench.collective_benchmark import CALLS, Measurement, group_sizes, parse_size
from meshwise.comm.api.flight_recorder import bus_factor

# doc/PERFORMANCE.md of nccl-tests, "Bus bandwidth", for groups of 2, 4 and 8 ranks.
DRAWN = """
    all_reduce      1     1.5   1.75
    reduce_scatter  0.5   0.75  0.875
    all_gather      0.5   0.75  0.875
    all_to_all      0.5   0.75  0.875
    gather          0.5   0.75  0.875
    scatter         0.5   0.75  0.875
    broadcast       1     1     1
    reduce          1     1     1
    send_recv       1     1     1
    copy            1     1     1
"""


def test_bus_factors_are_those_of_nccl_tests() -> None:
    drawn = {name: [float(factor) for factor in factors] for name, *factors in map(str.split, DRAWN.split("\n")[1:-1])}

    assert {kind: [bus_factor(kind, ranks=n) for n in (2, 4, 8)] for kind in CALLS} == drawn


def test_a_perfect_ring_shows_the_speed_of_its_link_whatever_the_number_of_ranks() -> None:
    link, size = 10e9, 64 << 20
    for n in (2, 4, 8, 64):
        seconds = 2 * (n - 1) / n * size / link  # each rank sends this much over its link, all links at once
        assert Measurement("all_reduce", n, size, seconds, seconds).bus_bandwidth == pytest.approx(link)


def test_bandwidth_is_of_the_median_call() -> None:
    one = Measurement("broadcast", 4, 1000, median_seconds=2e-6, min_seconds=1e-6)
    assert one.algorithm_bandwidth == pytest.approx(500e6)


def test_groups_are_those_that_the_ranks_divide_into() -> None:
    assert group_sizes(12) == (2, 3, 4, 6, 12)
    assert group_sizes(1) == ()


@pytest.mark.parametrize("text, size", [("4096", 4096), ("4K", 4096), ("64M", 64 << 20), ("1.5G", 3 << 29)])
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "four", "-4K", "4X", "0"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="4K, 64M"):
        parse_size(text)

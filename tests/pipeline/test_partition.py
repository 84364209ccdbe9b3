"""The best contiguous cut, against trying all of them."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.pipeline.cut.probe_result import CutError
from meshwise.pipeline.cut.stage_balance import PartitionItems, divide
from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, clock


def plain(loads: list[float], stages: int) -> PartitionItems:
    return PartitionItems([loads] * stages, [True] * len(loads), [0.0] * len(loads))


def largest(items: PartitionItems, bounds: tuple[int, ...]) -> float:
    return max(sum(items.loads[k][a:b]) for k, (a, b) in enumerate(itertools.pairwise(bounds)))


def every(items: PartitionItems) -> list[tuple[int, ...]]:
    count = len(items.solid)
    cuts = itertools.combinations(range(1, count), len(items.loads) - 1)
    bounds = [(0, *inner, count) for inner in cuts]
    return [one for one in bounds if any(items.solid[: one[1]]) and all(items.solid[bound] for bound in one[1:-1])]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_the_largest_stage_is_as_small_as_any_cut_makes_it(loads: list[int], stages: int) -> None:
    items = plain([float(load) for load in loads], stages)
    if stages > len(loads):
        with pytest.raises(CutError, match=f"at most pp·virtual_stages={len(loads)}"):
            divide(items)
        return
    bounds = divide(items)
    assert bounds in every(items)
    assert largest(items, bounds) == min(largest(items, other) for other in every(items))


@given(st.data())
def test_stages_that_weigh_differently_and_steps_that_cannot_stand_alone_are_tried_against_all_cuts(
    data: st.DataObject,
) -> None:
    count, stages = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count)
    solid = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    items = PartitionItems([data.draw(numbers) for _ in range(stages)], solid, data.draw(numbers))
    if sum(solid) < stages:
        with pytest.raises(CutError, match="do not fit"):
            divide(items)
        return
    slack = data.draw(st.sampled_from([0.0, 0.3]))
    best = min(largest(items, other) for other in every(items))
    allowed = [other for other in every(items) if largest(items, other) <= best * (1 + slack) + 1e-9]

    def sent(bounds: tuple[int, ...]) -> float:
        return sum(items.sent_bytes[bound] for bound in bounds[1:-1])

    bounds = divide(items, slack=slack)
    assert bounds in allowed
    assert math.isclose(sent(bounds), min(map(sent, allowed)))


def test_a_heavy_head_and_embedding_are_counted() -> None:
    assert divide(plain([5, 2, 2, 2, 2, 2, 2, 5], 4)) == (0, 1, 4, 7, 8)


def test_among_equals_the_most_even_cut_is_taken() -> None:
    assert divide(plain([4, 1, 1, 1, 1], 3)) == (0, 1, 3, 5)


def test_less_is_sent_for_a_little_unevenness() -> None:
    items = PartitionItems([[10.0, 10.0, 1.0, 19.5]] * 2, [True] * 4, [0, 9, 9, 1])
    assert divide(items, slack=0.0) == (0, 2, 4)
    assert divide(items, slack=0.05) == (0, 3, 4)


def test_a_later_stage_begins_only_at_parameters() -> None:
    items = PartitionItems([[1.0] * 4] * 2, [True, True, False, True], [0.0] * 4)
    assert divide(items) == (0, 1, 4)
    assert items.load(1, start=2, end=4) == math.inf


def test_for_a_schedule_the_large_stages_come_first() -> None:
    items = plain([1.0] * 9, 4)
    bounds = divide(items, front=0.3)
    assert bounds == (0, 3, 5, 7, 9)
    schedule = make_schedule("1f1b", pp=4, microbatches=8)

    def taken(bounds: tuple[int, ...]) -> float:
        return clock(schedule, costs=[ActionCost(*[load / 3] * 3) for load in items.stage_loads(bounds)]).seconds

    assert taken(bounds) == pytest.approx(min(map(taken, every(items))))

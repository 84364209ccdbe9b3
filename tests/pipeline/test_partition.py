"""The best contiguous cut, against trying all of them."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.pipeline.cut.piece_calls import CutError
from meshwise.pipeline.cut.stage_balance import PartitionItems, divide, improve_bounds
from meshwise.pipeline.schedules.named_schedules import make_schedule
from meshwise.pipeline.schedules.schedule_clock import ActionCost, StepClock, clock


def plain(loads: list[float], stages: int) -> PartitionItems:
    return PartitionItems([loads] * stages, [True] * len(loads), [0.0] * len(loads))


def largest(items: PartitionItems, bounds: tuple[int, ...]) -> float:
    return max(sum(items.loads[k][a:b]) for k, (a, b) in enumerate(itertools.pairwise(bounds)))


def every(items: PartitionItems) -> list[tuple[int, ...]]:
    count = len(items.solid)
    cuts = itertools.combinations(range(1, count), len(items.loads) - 1)
    bounds = [(0, *inner, count) for inner in cuts]
    return [one for one in bounds if all(any(items.solid[a:b]) for a, b in itertools.pairwise(one))]


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


@given(st.data())
def test_what_cuts_cost_is_counted_against_all_cuts(data: st.DataObject) -> None:
    count, stages = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count)
    before, after = ([0.0, *data.draw(numbers)[1:]] for _ in range(2))
    items = PartitionItems([data.draw(numbers)] * stages, [True] * count, [0.0] * count, before, after)
    if stages > count:
        return

    def heaviest(bounds: tuple[int, ...]) -> float:
        loads = [
            sum(items.loads[0][a:b]) + after[a] + (before[b] if b < count else 0.0)
            for a, b in itertools.pairwise(bounds)
        ]
        return max(loads)

    bounds = divide(items)
    assert heaviest(bounds) == max(items.stage_loads(bounds)) == min(map(heaviest, every(items)))


@pytest.mark.parametrize("name, virtual", [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)])
def test_the_clock_of_many_loads_is_the_clock(name: str, virtual: int) -> None:
    schedule = make_schedule(name, pp=4, microbatches=8, virtual_stages=virtual)
    loads = [1.0 + (5 * stage % 7) / 7 for stage in range(schedule.stages)]
    links = [0.3 + (3 * stage % 5) / 5 for stage in range(schedule.stages)]
    costs = [ActionCost(load / 3, load / 3, load / 3, link=link) for load, link in zip(loads, links, strict=True)]
    seconds = StepClock(schedule)(loads=loads, sent_bytes=links[:-1])
    assert seconds == pytest.approx(clock(schedule, costs=costs).seconds)


@pytest.mark.parametrize("name, virtual", [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)])
@pytest.mark.parametrize("pp", [2, 4])
def test_for_a_schedule_no_cut_into_blocks_and_a_head_makes_a_shorter_step(name: str, virtual: int, pp: int) -> None:
    schedule = make_schedule(name, pp=pp, microbatches=8, virtual_stages=virtual)
    items = plain([0.02, *[1.0] * 8, 1.35], schedule.stages)
    seconds = StepClock(schedule)

    def taken(bounds: tuple[int, ...]) -> float:
        return seconds(loads=[sum(items.loads[0][a:b]) for a, b in itertools.pairwise(bounds)])

    even = divide(items)
    quick, shortest = improve_bounds(items, bounds=even, clock=seconds)
    assert taken(quick) == pytest.approx(min(map(taken, every(items))), rel=0.01)
    assert shortest == pytest.approx(taken(quick))
    assert taken(quick) <= taken(even)


def test_a_cut_for_a_schedule_leaves_no_stage_without_parameters() -> None:
    items = PartitionItems([[1.0, 0.0, 5.0, 0.0, 1.0]] * 3, [True, False, True, False, True], [0.0] * 5)
    seconds = StepClock(make_schedule("1f1b", pp=3, microbatches=4))
    assert improve_bounds(items, bounds=divide(items), clock=seconds)[0] in every(items)


def test_the_clock_stops_at_its_limit() -> None:
    seconds = StepClock(make_schedule("1f1b", pp=2, microbatches=4))
    assert seconds(loads=[1.0, 2.0]) == 9.0
    assert seconds(loads=[1.0, 2.0], limit=8.0) == math.inf

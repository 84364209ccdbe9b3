"""Test pieces, runs, shards and padding of flat buffers with drawn parameters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwise.data_parallel.bucket_place import ALIGNMENT, BucketPlace, OptionRun, Options
from meshwise.layout.layout import Layout
from meshwise.model.parameter_table import ParameterRow

DECAY: Options = ()
NO_DECAY: Options = (("weight_decay", 0.0),)
SLOW: Options = (("lr", 1e-4),)


def row(name: str, shape: tuple[int, ...], options: Options = DECAY) -> ParameterRow:
    layout = Layout.replicated(len(shape))
    return ParameterRow(name, shape, torch.float32, True, (), "u", options, layout, ("dp",))


def laid(rows: list[ParameterRow], *, parts: int) -> BucketPlace:
    return BucketPlace.of(rows, shapes={row.name: row.shape for row in rows}, parts=parts)


def line(place: BucketPlace, spans: list[tuple[str, int, int]]) -> str:
    """A buffer, four elements to a letter."""
    letters = ["."] * (place.size // 4)
    for letter, start, stop in spans:
        letters[start // 4 : stop // 4] = letter * (stop // 4 - start // 4)
    return "".join(letters)


def test_a_layout_drawn() -> None:
    place = laid([row("a", (4, 6)), row("b", (8,), NO_DECAY), row("c", (12,)), row("d", (4,), NO_DECAY)], parts=3)
    pieces = line(place, [(piece.row.name, piece.start, piece.stop) for piece in place.pieces])
    runs = line(place, [("-" if run.options else "+", run.start, run.stop) for run in place.runs])
    shards = line(place, [(str(index), *place.shard(index)) for index in range(3)])
    assert [pieces, runs, shards] == [
        "bbd.aaaaaaccc...........",
        "----++++++++++++++++++++",
        "000000001111111122222222",
    ]
    assert place.padding == [(12, 16), (52, 96)]


def test_runs_begin_aligned() -> None:
    place = laid([row("a", (5,)), row("b", (3,), NO_DECAY), row("c", (4,), NO_DECAY)], parts=1)
    assert place.runs == (OptionRun(NO_DECAY, 0, 16), OptionRun(DECAY, 16, 32))
    assert place.padding == [(7, 16), (21, 32)]


def test_what_does_not_fill_equal_aligned_shards_is_padded() -> None:
    place = laid([row("a", (33,))], parts=2)
    assert place.size == 64
    assert place.padding == [(33, 64)]
    assert place.shard(1) == (32, 64)


def test_parameters_without_elements_still_give_every_rank_a_shard() -> None:
    place = laid([row("a", (0, 3))], parts=4)
    assert [place.shard(index) for index in range(4)] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert place.runs == (OptionRun(DECAY, 0, 64),)


@pytest.mark.parametrize(
    "start, stop, part",
    [(0, 30, (10, 20)), (12, 15, (12, 15)), (0, 12, (10, 12)), (15, 40, (15, 20)), (0, 10, None), (20, 30, None)],
)
def test_the_part_of_a_run_inside_a_slice(start: int, stop: int, part: tuple[int, int] | None) -> None:
    assert OptionRun(SLOW, 10, 20).within(start, stop=stop) == (None if part is None else OptionRun(SLOW, *part))


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
parameters = st.lists(st.tuples(shapes, st.sampled_from([DECAY, NO_DECAY, SLOW])), min_size=1, max_size=8)
places = st.builds(
    lambda drawn, parts: laid([row(f"p{n}", *each) for n, each in enumerate(drawn)], parts=parts),
    parameters,
    st.integers(1, 7),
)


@given(places)
def test_shards_tile_the_buffer_in_equal_aligned_parts(place: BucketPlace) -> None:
    shards = [place.shard(index) for index in range(place.parts)]
    assert [element for shard in shards for element in range(*shard)] == list(range(place.size))
    assert {stop - start for start, stop in shards} == {place.size // place.parts}
    assert place.size // place.parts % ALIGNMENT == 0


@given(places)
def test_pieces_lie_side_by_side_with_only_padding_between(place: BucketPlace) -> None:
    elements = [element for piece in place.pieces for element in range(piece.start, piece.stop)]
    between = [element for gap in place.padding for element in range(*gap)]
    assert elements == sorted(elements)
    assert sorted(elements + between) == list(range(place.size))
    assert all(piece.stop - piece.start == piece.row.numel for piece in place.pieces)


@given(places)
def test_padding_is_less_than_one_line_a_shard_and_one_a_run(place: BucketPlace) -> None:
    padding = sum(stop - start for start, stop in place.padding)
    empty = not any(piece.row.numel for piece in place.pieces)
    assert padding < (place.parts + len(place.runs) - 1) * ALIGNMENT or empty
    assert all(run.start % ALIGNMENT == 0 for run in place.runs)


@given(places)
def test_runs_cover_the_buffer_one_for_each_options(place: BucketPlace) -> None:
    assert [element for run in place.runs for element in range(run.start, run.stop)] == list(range(place.size))
    assert len({run.options for run in place.runs}) == len(place.runs)
    for piece in place.pieces:
        own = next(run for run in place.runs if run.options == piece.row.options)
        assert own.start <= piece.start <= piece.stop <= own.stop


@given(places)
def test_the_parts_of_runs_inside_a_shard_are_the_shard(place: BucketPlace) -> None:
    for index in range(place.parts):
        low, high = place.shard(index)
        parts = [part for run in place.runs if (part := run.within(low, stop=high))]
        assert [element for part in parts for element in range(part.start, part.stop)] == list(range(low, high))

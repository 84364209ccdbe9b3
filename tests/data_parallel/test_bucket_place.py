"""Test pieces, runs, shards and padding of flat buffers with drawn parameters."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwise.data_parallel.bucket_layout import ALIGNMENT, BucketPlace, Options
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
    runs = line(place, [("-" if options else "+", start, stop) for options, start, stop in place.runs])
    shards = line(place, [(str(index), *place.shard(index)) for index in range(3)])
    assert [pieces, runs, shards] == [
        "bbd.aaaaaaccc...........",
        "----++++++++++++++++++++",
        "000000001111111122222222",
    ]
    assert place.padding == [(12, 16), (52, 96)]


def test_runs_begin_aligned() -> None:
    place = laid([row("a", (5,)), row("b", (3,), NO_DECAY), row("c", (4,), NO_DECAY)], parts=1)
    assert place.runs == ((NO_DECAY, 0, 16), (DECAY, 16, 32))
    assert place.padding == [(7, 16), (21, 32)]


def test_what_does_not_fill_equal_aligned_shards_is_padded() -> None:
    place = laid([row("a", (33,))], parts=2)
    assert place.size == 64
    assert place.padding == [(33, 64)]
    assert place.shard(1) == (32, 64)


def test_parameters_without_elements_still_give_every_rank_a_shard() -> None:
    place = laid([row("a", (0, 3))], parts=4)
    assert [place.shard(index) for index in range(4)] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert place.runs == ((DECAY, 0, 64),)


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
    assert all(start % ALIGNMENT == 0 for _, start, _ in place.runs)


@given(places)
def test_runs_cover_the_buffer_one_for_each_options(place: BucketPlace) -> None:
    assert [element for _, start, stop in place.runs for element in range(start, stop)] == list(range(place.size))
    assert len({options for options, _, _ in place.runs}) == len(place.runs)
    for piece in place.pieces:
        [(start, stop)] = [run[1:] for run in place.runs if run[0] == piece.row.options]
        assert start <= piece.start <= piece.stop <= stop

"""Test that the rectangles of a range of elements cover exactly these elements."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwise.base.mesh import even_split
from meshwise.layout.layout import Rectangle, rectangles

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    bounds = st.integers(0, math.prod(shape))
    start, stop = sorted((draw(bounds), draw(bounds)))
    return shape, start, stop


@given(slices())
def test_rectangles_are_the_elements_of_the_slice_in_order(cut: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = cut
    full = torch.arange(math.prod(shape)).view(shape)
    parts = rectangles(shape, start=start, stop=stop)
    elements = [element for part in parts for element in full[part.slices].flatten().tolist()]
    assert elements == list(range(start, stop))
    assert all(part.numel > 0 for part in parts)


@given(slices())
def test_a_slice_is_at_most_twice_ndim_less_one_rectangles(cut: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = cut
    assert len(rectangles(shape, start=start, stop=stop)) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_the_bound_is_reached(ndim: int) -> None:
    shape = (3,) * ndim
    assert len(rectangles(shape, start=1, stop=3**ndim - 1)) == 2 * ndim - 1


def drawn(shape: tuple[int, int], parts: list[Rectangle]) -> str:
    """A matrix with each element as the letter of its rectangle."""
    cells = [["."] * shape[1] for _ in range(shape[0])]
    for letter, part in zip("abc", parts, strict=False):
        for row in range(shape[0])[part.slices[0]]:
            for column in range(shape[1])[part.slices[1]]:
                cells[row][column] = letter
    return "\n".join(" ".join(row) for row in cells)


@pytest.mark.parametrize(
    "start, stop, picture",
    [
        (3, 16, ". . . a a\nb b b b b\nb b b b b\nc . . . ."),
        (5, 15, ". . . . .\na a a a a\na a a a a\n. . . . ."),
        (6, 9, ". . . . .\n. a a a .\n. . . . .\n. . . . ."),
        (8, 12, ". . . . .\n. . . a a\nb b . . .\n. . . . ."),
        (0, 20, "a a a a a\na a a a a\na a a a a\na a a a a"),
        (7, 7, ". . . . .\n. . . . .\n. . . . .\n. . . . ."),
    ],
)
def test_a_slice_of_a_matrix_drawn(start: int, stop: int, picture: str) -> None:
    assert drawn((4, 5), rectangles((4, 5), start=start, stop=stop)) == picture


@given(size=st.integers(0, 100), parts=st.integers(1, 20))
def test_an_even_split_covers_with_sizes_that_differ_by_one_at_most(size: int, parts: int) -> None:
    bounds = even_split(size, parts)
    assert [index for start, stop in bounds for index in range(start, stop)] == list(range(size))
    sizes = [stop - start for start, stop in bounds]
    assert len(sizes) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_the_first_parts_are_larger() -> None:
    assert even_split(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert even_split(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize("size, parts", [(-1, 2), (3, 0)])
def test_a_split_into_nothing_is_refused(size: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"cannot split {size} into {parts} parts"):
        even_split(size, parts)


@pytest.mark.parametrize("start, stop", [(-1, 2), (3, 2), (0, 21)])
def test_a_slice_beyond_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"a tensor of shape (4, 5) has no elements {start} to {stop}")):
        rectangles((4, 5), start=start, stop=stop)

"""Test that layouts print their splits, and that the parts of all ranks tile the tensor."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwise import Layout, Mesh
from meshwise.layout.layout import DimSplit

AXES = ("dp", "row", "col", "tp")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A layout of up to three dims in which every axis plays at most one part."""
    ndim = draw(st.integers(0, 3))
    splits: list[list[str]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(AXES)):
        place = draw(st.integers(-1, ndim - 1))
        if place >= 0:
            splits[place].append(axis)
    return Layout(tuple(map(tuple, splits)))


meshes = st.tuples(*[st.integers(1, 3)] * 4).map(lambda degrees: Mesh(tuple(zip(AXES, degrees, strict=True))))


def as_printed(text: str) -> Layout:
    """Return the layout without cuts that prints as `text`."""
    return Layout(tuple(() if axes == "-" else tuple(axes.split(".")) for axes in text.split(",")))


@pytest.mark.parametrize("text", ["-", "dp,-", "row.dp,col", "-,tp.dp,row"])
def test_a_layout_prints_its_splits(text: str) -> None:
    assert str(as_printed(text)) == text


def test_a_layout_prints_its_cuts() -> None:
    cuts = (DimSplit((8, 8), 4), DimSplit(grain=2), DimSplit((3,)))
    assert str(Layout((("tp",), ("dp",), ()), cuts=(*cuts[:2], DimSplit()))) == "tp[8|8:4],dp[:2],-"
    assert str(Layout(((),), cuts=cuts[2:])) == "-[3]"


@given(layout=layouts(), mesh=meshes, data=st.data())
def test_the_parts_of_all_ranks_tile_the_tensor(layout: Layout, mesh: Mesh, data: st.DataObject) -> None:
    """Every element lies on as many ranks as the axes that do not split have coordinates."""
    shape = data.draw(st.tuples(*[st.integers(0, 7)] * len(layout.splits)))
    counts = torch.zeros(shape, dtype=torch.int64)
    for rank in range(mesh.size):
        part = layout.local(shape, mesh=mesh, rank=rank)
        assert all(cut.start >= 0 and cut.stop <= size for cut, size in zip(part.slices, shape, strict=True))
        counts[part.slices] += 1
    splitting = {axis for axes in layout.splits for axis in axes}
    copies = math.prod(mesh.degree(axis) for axis in mesh.names if axis not in splitting)
    assert torch.equal(counts, torch.full(shape, copies, dtype=torch.int64))


def owners(text: str, shape: tuple[int, int], mesh: Mesh) -> str:
    """A matrix with each element as the ranks that hold it."""
    cells = [[""] * shape[1] for _ in range(shape[0])]
    for rank in range(mesh.size):
        part = as_printed(text).local(shape, mesh=mesh, rank=rank)
        for row in range(shape[0])[part.slices[0]]:
            for column in range(shape[1])[part.slices[1]]:
                cells[row][column] += str(rank)
    return "\n".join(" ".join(row) for row in cells)


@pytest.mark.parametrize(
    "text, picture",
    [
        ("-,-", "0123 0123 0123\n0123 0123 0123\n0123 0123 0123"),
        ("dp,-", "01 01 01\n01 01 01\n23 23 23"),
        ("dp,tp", "0 0 1\n0 0 1\n2 2 3"),
        ("dp.tp,-", "0 0 0\n1 1 1\n2 2 2"),
        ("tp.dp,-", "0 0 0\n2 2 2\n1 1 1"),
        ("-,dp", "01 01 23\n01 01 23\n01 01 23"),
    ],
)
def test_a_matrix_of_three_by_three_over_two_by_two_ranks_drawn(text: str, picture: str) -> None:
    assert owners(text, (3, 3), Mesh.of(dp=2, tp=2)) == picture


def test_a_replicated_layout_is_whole_everywhere() -> None:
    assert str(Layout.replicated(2)) == "-,-"
    assert str(Layout.replicated(0)) == "()"
    part = Layout.replicated(2).local((3, 4), mesh=Mesh.of(dp=2), rank=1)
    assert (part.offsets, part.sizes) == ((0, 0), (3, 4))


@pytest.mark.parametrize("text", ["dp,dp", "dp.dp,-"])
def test_an_axis_occurs_once_in_a_layout(text: str) -> None:
    with pytest.raises(ValueError, match=f"axis dp appears twice in the layout '{re.escape(text)}'"):
        as_printed(text)


def test_a_layout_and_a_shape_have_the_same_dims() -> None:
    with pytest.raises(ValueError, match=re.escape("the layout 'dp,-' has 2 dims, the shape (4,) 1")):
        as_printed("dp,-").local((4,), mesh=Mesh.of(dp=2), rank=0)


def test_the_mesh_has_every_axis_of_the_layout() -> None:
    with pytest.raises(ValueError, match="no axis tp in the mesh 'dp=2'"):
        as_printed("tp").local((4,), mesh=Mesh.of(dp=2), rank=0)


@st.composite
def cut_matrices(draw: st.DrawFn) -> tuple[Layout, tuple[int, int]]:
    """A matrix whose rows have sections in whole grains, split by two axes, and its columns by a third."""
    grain = draw(st.integers(1, 3))
    sections = tuple(grain * count for count in draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    layout = Layout((("row", "tp"), ("col",)), cuts=(DimSplit(sections, grain), DimSplit()))
    return layout, (sum(sections), draw(st.integers(0, 5)))


@given(drawn=cut_matrices(), mesh=meshes)
def test_each_section_of_a_dim_is_split_separately(drawn: tuple[Layout, tuple[int, int]], mesh: Mesh) -> None:
    layout, shape = drawn
    counts = torch.zeros(shape, dtype=torch.int64)
    starts = [sum(layout.cuts[0].sections[:number]) for number in range(len(layout.cuts[0].sections))]
    for rank in range(mesh.size):
        pieces = layout.pieces(shape, mesh=mesh, rank=rank)
        for piece, start, size in zip(pieces, starts, layout.cuts[0].sections, strict=True):
            assert start <= piece.offsets[0] <= piece.offsets[0] + piece.sizes[0] <= start + size
            assert piece.offsets[0] % layout.cuts[0].grain == piece.sizes[0] % layout.cuts[0].grain == 0
            counts[piece.slices] += 1
        together = torch.cat([counts[piece.slices] for piece in pieces], dim=layout.section_dim)
        assert layout.local_shape(shape, mesh=mesh, rank=rank) == tuple(together.shape)
    assert torch.equal(counts, torch.full(shape, mesh.degree("dp"), dtype=torch.int64))


@given(size=st.integers(0, 20), mesh=meshes)
def test_a_second_axis_splits_the_parts_of_the_first_one(size: int, mesh: Mesh) -> None:
    outer, both = Layout((("row",),)), Layout((("row", "tp"),))
    for rank in range(mesh.size):
        parts = [both.local((size,), mesh=mesh, rank=other) for other in mesh.group(rank, axes=["tp"])]
        assert parts[0].offsets == outer.local((size,), mesh=mesh, rank=rank).offsets
        assert sum(part.numel for part in parts) == outer.local((size,), mesh=mesh, rank=rank).numel


def test_a_dim_that_does_not_fit_its_cut_is_refused() -> None:
    mesh = Mesh.of(tp=2)
    with pytest.raises(ValueError, match=re.escape("a dim of 10 cannot be cut as '[:4]'")):
        Layout((("tp",), ()), cuts=(DimSplit(grain=4), DimSplit())).local((10, 2), mesh=mesh, rank=0)
    with pytest.raises(ValueError, match=re.escape("two dims have sections")):
        Layout((("tp",), ()), cuts=(DimSplit((1, 1)), DimSplit((2, 2))))

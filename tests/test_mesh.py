"""Test the mesh: ranks, coordinates and groups along named axes."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise import Mesh

NAMES = ("pp", "dp", "cp", "ep", "tp")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    return Mesh(tuple((name, draw(st.integers(1, 3))) for name in names))


@st.composite
def meshes_and_axes(draw: st.DrawFn) -> tuple[Mesh, list[str]]:
    mesh = draw(meshes())
    return mesh, draw(st.lists(st.sampled_from(mesh.names), unique=True)) if mesh.names else []


@given(meshes())
def test_each_rank_has_a_coordinate_of_its_own(mesh: Mesh) -> None:
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert all(tuple(coordinate) == mesh.names for coordinate in coordinates)
    assert len({tuple(coordinate.values()) for coordinate in coordinates}) == mesh.size


@given(meshes_and_axes())
def test_the_groups_along_any_axes_partition_the_ranks(mesh_and_axes: tuple[Mesh, list[str]]) -> None:
    mesh, axes = mesh_and_axes
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert {len(group) for group in groups} == {math.prod(mesh.degree(axis) for axis in axes)}
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@given(meshes_and_axes())
def test_a_group_is_the_ranks_that_differ_along_its_axes_only(mesh_and_axes: tuple[Mesh, list[str]]) -> None:
    mesh, axes = mesh_and_axes
    others = [[c[name] for name in mesh.names if name not in axes] for c in map(mesh.coordinate, range(mesh.size))]
    for group in mesh.groups(axes):
        assert list(group) == [rank for rank in range(mesh.size) if others[rank] == others[group[0]]]
        assert all(mesh.group(rank, axes=axes) == mesh.group(rank, axes=axes[::-1]) == group for rank in group)


def test_the_last_axis_varies_fastest() -> None:
    mesh = Mesh.of(pp=2, dp=2, tp=2)
    assert str(mesh) == "pp=2 dp=2 tp=2"
    assert (mesh.size, mesh.degree("dp"), mesh.names) == (8, 2, ("pp", "dp", "tp"))
    assert mesh.coordinate(6) == {"pp": 1, "dp": 1, "tp": 0}
    assert mesh.group(6, axes=["tp"]) == (6, 7)
    assert mesh.group(6, axes=["tp", "pp"]) == (2, 3, 6, 7)
    assert mesh.groups(["dp"]) == ((0, 2), (1, 3), (4, 6), (5, 7))


PICTURES = {
    "": """
        rank │ 0
    """,
    "dp=1 tp=1": """
        rank │ 0
    """,
    "dp=4 tp=1": """
          dp │ 0  1  2  3
        rank │ 0  1  2  3
    """,
    "pp=1 dp=2 tp=2": """
          tp │ 0  1
        dp 0 │ 0  1
        dp 1 │ 2  3
    """,
    "dp=2 depth=2": """
        depth │ 0  1
         dp 0 │ 0  1
         dp 1 │ 2  3
    """,
    "pp=2 dp=3 cp=1 tp=2": """
        pp=0
          tp │  0   1
        dp 0 │  0   1
        dp 1 │  2   3
        dp 2 │  4   5
        pp=1
          tp │  0   1
        dp 0 │  6   7
        dp 1 │  8   9
        dp 2 │ 10  11
    """,
    "pp=4 dp=64 tp=32": """
        pp=0
           tp │    0     1     2     3     4     5     6     7     8     9     …    31
         dp 0 │    0     1     2     3     4     5     6     7     8     9     …    31
         dp 1 │   32    33    34    35    36    37    38    39    40    41     …    63
         dp 2 │   64    65    66    67    68    69    70    71    72    73     …    95
         dp 3 │   96    97    98    99   100   101   102   103   104   105     …   127
            … │
        dp 63 │ 2016  2017  2018  2019  2020  2021  2022  2023  2024  2025     …  2047
    """,
}


@pytest.mark.parametrize("text", PICTURES)
def test_a_picture_shows_where_the_ranks_lie(text: str) -> None:
    drawn = Mesh.of(**{name: int(degree) for name, degree in re.findall(r"(\w+)=(\d+)", text)}).picture().splitlines()
    expected = [line.removeprefix(" " * 8) for line in PICTURES[text].splitlines()[1:-1]]
    assert drawn[: len(expected)] == expected


@given(meshes())
def test_a_picture_that_elides_nothing_names_every_rank_once(mesh: Mesh) -> None:
    picture = mesh.picture()
    lines = re.findall(r"^(?:rank|.* \d+) │ (.*)$", picture, re.MULTILINE)
    drawn = [int(cell) for line in lines for cell in line.split()]
    assert drawn == list(range(len(drawn)))
    assert len(drawn) == mesh.size or picture.endswith(f"more, to rank {mesh.size - 1}")


def test_a_picture_of_a_large_world_fits_on_a_screen() -> None:
    lines = Mesh.of(pp=16, dp=64, tp=32).picture().splitlines()
    assert lines[-1] == "… 13 more, to rank 32767"
    assert len(lines) < 30
    assert max(map(len, lines)) < 100


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Mesh.of(dp=0), "axis dp has degree 0"),
        (lambda: Mesh((("dp", 2), ("dp", 2))), "axis dp is named twice"),
        (lambda: Mesh((("d p", 2),)), "'d p' cannot name an axis"),
        (lambda: Mesh.of(dp=2).degree("tp"), "no axis tp in the mesh 'dp=2'; its axes are dp"),
        (lambda: Mesh.of(dp=2).group(0, axes=["tp"]), "no axis tp in the mesh 'dp=2'"),
        (lambda: Mesh.of(dp=2).groups(["tp"]), "no axis tp in the mesh 'dp=2'"),
        (lambda: Mesh.of(dp=2).group(2, axes=["dp"]), "no rank 2 in the mesh dp=2: its ranks are 0 to 1"),
        (lambda: Mesh.of(dp=2).coordinate(-1), "no rank -1"),
    ],
)  # fmt: skip
def test_a_wrong_mesh_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_joint_axis_is_used_like_its_axes_together() -> None:
    joint = (("dp", ("dp_outer", "dp_ep")), ("ep", ("dp_ep",)), ("etp", ()))
    mesh = Mesh((("dp_outer", 2), ("dp_ep", 2), ("tp", 2)), joint=joint)
    plain = Mesh.of(dp=4, tp=2)
    assert (mesh.degree("dp"), mesh.degree("ep"), mesh.degree("etp")) == (4, 2, 1)
    assert mesh.groups(["dp"]) == plain.groups(["dp"])
    for rank in range(mesh.size):
        assert mesh.index(rank, axis="dp") == plain.index(rank, axis="dp")
        assert mesh.group(rank, axes=["dp", "tp"]) == plain.group(rank, axes=["dp", "tp"])
        assert mesh.group(rank, axes=["etp"]) == (rank,)
    assert mesh.expand(["ep", "dp"]) == ("dp_outer", "dp_ep")
    assert mesh.others(["ep", "etp"]) == ("dp_outer", "tp")

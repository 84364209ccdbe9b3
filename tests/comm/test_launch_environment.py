"""Test the environment variables that a launcher sets for a rank, and the errors if some are missing."""

import os
from unittest import mock

import pytest

from meshwise.comm.api.launcher_info import launched_rank, prints_for_job
from meshwise.comm.api.world import World
from meshwise.comm.launch.connect import connect
from meshwise.comm.launch.launch import run

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ALL = {**MEETING, "RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "told, expected",
    [
        ({}, None),
        (MEETING, None),  # as scripts of a cluster export it before they start torchrun
        ({"LOCAL_RANK": "0"}, None),
        ({"RANK": "", "WORLD_SIZE": ""}, None),
        (ALL, (1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
    ],
)
def test_a_process_with_launcher_variables_is_a_rank(told: dict[str, str], expected: tuple[int, int] | None) -> None:
    with mock.patch.dict(os.environ, told, clear=True):
        assert launched_rank() == expected


@pytest.mark.parametrize(
    "told, said",
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but not RANK, MASTER_ADDR, MASTER_PORT; .* or unset WORLD_SIZE$"),
        ({"RANK": "0"}, "RANK is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT; .* or unset RANK$"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, but not MASTER_ADDR, MASTER_PORT; start"),
        ({**ALL, "RANK": ""}, "WORLD_SIZE is set, but not RANK; start the ranks with torchrun"),
        ({**ALL, "RANK": "first"}, "not a whole number: RANK=first; start the ranks with torchrun"),
        ({**ALL, "RANK": "-1"}, "not a whole number: RANK=-1"),
        ({**ALL, "WORLD_SIZE": "9" * 5000}, "not a whole number: WORLD_SIZE=999"),
        ({**ALL, "RANK": "2"}, "RANK=2 in a world of WORLD_SIZE=2; number the ranks 0 to 1"),
        ({**ALL, "WORLD_SIZE": "0"}, "RANK=1 in a world of WORLD_SIZE=0"),
    ],
)
def test_a_part_of_it_or_nonsense_is_refused(told: dict[str, str], said: str) -> None:
    with mock.patch.dict(os.environ, told, clear=True), pytest.raises(ValueError, match=said):
        launched_rank()


def nothing(world: World) -> None: ...


@pytest.mark.parametrize("told", [{"WORLD_SIZE": "2"}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_neither_run_nor_connect_guess(told: dict[str, str]) -> None:
    rest = {name: value for name, value in os.environ.items() if name not in ALL}
    with mock.patch.dict(os.environ, rest | told, clear=True):
        with pytest.raises(ValueError, match="set, but not"):
            run(2, nothing)
        with (
            mock.patch("meshwise.comm.launch.connect._worlds", return_value={}),
            pytest.raises(ValueError, match="set, but not"),
        ):
            connect(device="cpu")


@pytest.mark.parametrize("rank, first", [(None, True), ("", True), ("0", True), ("1", False)])
def test_one_speaks_for_all(rank: str | None, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    assert prints_for_job() == first

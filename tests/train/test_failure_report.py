"""What is left of an error: one line, and a file with the traceback."""

import os
from pathlib import Path

import pytest
import torch

from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.launcher_info import RankLostError
from meshwise.comm.api.world import World
from meshwise.engine.step_result import NonFiniteError
from meshwise.model.forward import LossError
from meshwise.testing import run
from meshwise.train.console_output import leave_traceback, notes


def fail(error: Exception | None) -> None:
    if error is not None:
        raise error
    torch.ones(2) @ torch.ones(3)


def caught(error: Exception | None = None) -> Exception:
    try:
        fail(error)
    except Exception as raised:  # noqa: BLE001 - whatever it is
        return raised
    raise AssertionError


def test_the_note_tells_the_rank_the_line_of_the_users_own_code_and_the_file(tmp_path: Path) -> None:
    def main(world: World) -> None:
        if world.rank == 1:
            error = caught()
            leave_traceback(error, world=world, folder=tmp_path)
            leave_traceback(error, world=world)  # whoever sees it next adds nothing
            [note] = notes(error)
            assert note.startswith(f"raised on rank 1 of 2 at {__file__}:")
            assert note.endswith(f" fail; the whole traceback is in {tmp_path}/failure-rank-1.txt")

    run(2, main)
    text = (tmp_path / "failure-rank-1.txt").read_text()
    assert text.startswith("Traceback (most recent call last)")
    assert "torch.ones(2) @ torch.ones(3)" in text


def test_without_a_folder_the_file_is_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = caught(KeyError("x"))
    leave_traceback(error)
    [file] = tmp_path.glob("meshwise-*/failure.txt")
    assert notes(error)[0].endswith(f"; the whole traceback is in {file}")


def test_where_there_is_no_room_for_the_file_the_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    error = caught()
    for _ in range(2):
        leave_traceback(error, folder=tmp_path)
    assert notes(error)[0].endswith(" fail; the whole traceback could not be written: No space left on device")
    assert len(notes(error)) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [LossError, NonFiniteError, RankLostError, RanksDisagree])
def test_an_error_that_says_all_leaves_no_file(kind: type[Exception], tmp_path: Path) -> None:
    error = caught(kind("all there is to say"))
    leave_traceback(error, folder=tmp_path)
    assert notes(error) == []
    assert not list(tmp_path.iterdir())

"""Files that commands write: refused before the work, and replaced whole or not at all."""

import os
from pathlib import Path

import pytest

from meshwise.bench.collective_benchmark import COPY, Measurement, as_table
from meshwise.cli.main import main
from meshwise.cli.shared_flags import check_outputs, write_and_say
from meshwise.train.job_settings import JobError


def full(path: Path) -> None:
    """Write half of a file to a disk that is full then."""
    path.write_text("half")
    raise OSError(28, "No space left on device")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("whole")
    with pytest.raises(JobError, match=r"cannot write .*a\.txt: No space left on device"):
        write_and_say(path, write=full)
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_a_read_only_file_is_refused_before_the_work_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda place, _mode: place != path)
    with pytest.raises(JobError, match=r"cannot write .*a\.txt: no permission to write to it or to"):
        check_outputs([path])
    with pytest.raises(JobError, match=r"cannot write .*a\.txt: it is read-only"):
        write_and_say(path, write=lambda path: path.write_text("new"))
    assert path.read_text() == "old"


def test_a_file_in_a_folder_that_takes_no_others_is_written_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr("meshwise.cli.shared_flags.os.access", lambda place, _mode: place != tmp_path)
    check_outputs([path])
    written: list[Path] = []
    write_and_say(path, write=written.append)
    assert written == [path]
    monkeypatch.setattr("meshwise.cli.shared_flags.os.access", lambda _place, _mode: False)
    with pytest.raises(JobError, match=r"a\.txt: no permission to write to it or to"):
        check_outputs([path])


def test_what_is_no_file_is_written_as_it_is(tmp_path: Path) -> None:
    write_and_say(Path(os.devnull), write=lambda path: path.write_text("gone"))
    assert not Path(os.devnull).is_file()
    check_outputs([Path(os.devnull), None, tmp_path / "a" / "b"])


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "calibrate", "--ranks=1", "--output"],
        ["bench", "collectives", "--ranks=2", "--json"],
    ],
)
def test_a_benchmark_is_not_begun_for_a_file_that_cannot_be_written(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_args: object, **_options: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("meshwise.cli.bench_command.run", measured)
    assert main([*words, str(tmp_path)]) == 2
    assert f"cannot write {tmp_path}: it is a folder; name a file in it" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0.1", "0", "9" * 400])
def test_what_is_no_size_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", "--ranks=2", f"--sizes={size}"]) == 2
    assert "is not a size; write bytes" in capsys.readouterr().err


def test_a_table_of_copies_alone_has_no_rows() -> None:
    assert len(as_table([Measurement(COPY, 2, 4096, 1e-6, 1e-6)])) == 1  # the titles


@pytest.mark.parametrize("words", [["bench", "collectives"], ["bench", "calibrate"], ["simulate", "--memory"]])
def test_a_number_of_ranks_that_no_launcher_gives_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "abc", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(words) == 2
    assert "not a whole number: WORLD_SIZE=abc; start the ranks with torchrun" in capsys.readouterr().err

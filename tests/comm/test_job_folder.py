"""The folder of a job goes with it, and that of a killed one with the next; nothing else does."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwise.comm.launch.job_folder import hold, job_folder, last_start, start_folder

HOLDING = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from meshwise.comm.launch.job_folder import job_folder
with job_folder() as folder:
    (folder / "start-0").mkdir()
    (folder / "start-0" / "0").write_text("outcome")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another launcher, and its folder."""
    command = [sys.executable, "-c", HOLDING, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_it_goes_with_the_job_however_that_ends(root: Path) -> None:
    with job_folder() as folder:
        (folder / "logs").mkdir()
        assert folder.parent == root
        assert not folder.stat().st_mode & 0o077
    with pytest.raises(KeyboardInterrupt), job_folder():
        raise KeyboardInterrupt
    assert list(root.iterdir()) == []


def test_that_of_a_killed_job_goes_with_the_next_one_and_that_of_one_that_runs_stays(
    root: Path, other: tuple[subprocess.Popen[str], Path]
) -> None:
    process, folder = other
    with job_folder():
        assert (folder / "start-0" / "0").exists()
    process.kill()
    process.wait()
    assert folder.exists()
    with job_folder() as own:
        assert list(root.iterdir()) == [own]


def test_ranks_that_outlive_their_launcher_keep_it(root: Path, other: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = other
    held = hold(folder)
    assert held is not None
    process.kill()
    process.wait()
    with job_folder():
        assert folder.exists()
    os.close(held)
    with job_folder():
        assert not folder.exists()


def test_what_is_no_job_of_ours_stays(root: Path) -> None:
    pointed_to = root / "meshwise-x1y2" / "failure.txt"
    pointed_to.parent.mkdir()
    pointed_to.write_text("Traceback")
    (root / "meshwise-job-file").touch()
    (root / "meshwise-job-notes").mkdir()
    (root / "meshwise-job-notes" / "start-0").touch()
    (root / "kept").mkdir()
    (root / "kept" / "made-by-meshwise").touch()
    (root / "meshwise-job-link").symlink_to(root / "kept")
    if not os.getuid():
        (root / "meshwise-job-another-users").mkdir()
        (root / "meshwise-job-another-users" / "made-by-meshwise").touch()
        os.chown(root / "meshwise-job-another-users", 4321, 1234)
    before = set(root.rglob("*"))
    with job_folder():
        pass
    assert set(root.rglob("*")) == before


def test_that_of_a_launcher_that_was_killed_at_once_goes_too(root: Path) -> None:
    (root / "meshwise-job-empty").mkdir()
    with job_folder() as own:
        assert list(root.iterdir()) == [own]


def test_where_there_are_no_locks_nothing_is_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_descriptor: int, _how: int) -> None:
        raise OSError(95, "Operation not supported")

    (root / "meshwise-job-left").mkdir()
    (root / "meshwise-job-left" / "made-by-meshwise").touch()
    monkeypatch.setattr("meshwise.comm.launch.job_folder.fcntl.flock", refused)
    with job_folder() as folder:
        assert folder.is_dir()
    assert [path.name for path in root.iterdir()] == ["meshwise-job-left"]


def test_the_last_start_is_the_one_with_the_largest_number(tmp_path: Path) -> None:
    for number in (0, 2, 10):
        start_folder(tmp_path, number=number).mkdir()
    assert last_start(tmp_path).name == "start-10"

"""Test that a file is replaced completely or not at all, whatever exists at its path."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from meshwise.base.atomic_file import is_read_only, write_whole


def fails(path: Path) -> None:
    """Write half of a file to a disk that is full then."""
    path.write_text("half")
    raise OSError(28, "No space left on device")


def says(text: str, path: Path) -> None:
    path.write_text(text)


def new(path: Path) -> None:
    says("new", path)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("aside", [True, False])
def test_a_write_that_fails_leaves_the_old_file_and_names_it(there: bool, aside: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    if there:
        path.write_text("old")
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"):
        write_whole(path, write=fails, aside=tmp_path / "aside" if aside else None)
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == ({"a.txt": "old"} if there else {})


def test_a_full_disk_may_be_reported_by_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "a.txt").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"):
        write_whole(tmp_path / "a.txt", write=new)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.txt", "old")]


def test_an_interruption_leaves_the_old_file(tmp_path: Path) -> None:
    def stopped(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.txt", write=stopped)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.txt", "old")]


def test_a_read_only_file_in_a_writable_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place).resolve() != path or mode != os.W_OK)
    for place in (path, link):
        assert is_read_only(place)
        with pytest.raises(PermissionError, match=r"it is read-only: '.*'"):
            write_whole(place, write=new)
    assert path.read_text() == "old"
    assert not is_read_only(tmp_path / "b.txt")


def test_a_file_keeps_its_mode_and_its_owner_and_a_link_its_target(tmp_path: Path) -> None:
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    if not os.getuid():
        with contextlib.suppress(OSError):  # in a container that has no such owner
            os.chown(path, 4321, 1234)
    before = path.stat()
    link.symlink_to(path)
    write_whole(link, write=new)
    after = path.stat()
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino


def test_the_missing_target_of_a_link_is_created(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    write_whole(tmp_path / "link", write=new)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a.txt").read_text() == "new"


def test_in_a_folder_that_takes_no_new_files_a_file_is_overwritten_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    before = path.stat().st_ino
    monkeypatch.setattr(os, "access", lambda place, _mode: place != tmp_path)
    write_whole(path, write=new)
    assert (path.read_text(), path.stat().st_ino) == ("new", before)


def test_a_pipe_is_written_directly(tmp_path: Path) -> None:
    pipe, heard = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, write=new)
    reader.join()
    assert heard == ["new"]
    assert pipe.is_fifo()


def test_the_file_that_a_killed_writer_left_aside_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "aside").write_text("half of something long")
    write_whole(tmp_path / "a.txt", write=new, aside=tmp_path / "aside")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.txt", "new")]


def test_a_name_may_be_as_long_as_a_name_can_be(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)
    for text in ("one", "other"):
        write_whole(path, write=lambda place, text=text: says(text, place))  # type: ignore[misc] # a lambda has no types
    assert path.read_text() == "other"

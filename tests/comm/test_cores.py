"""Test how many processes a machine may run if only some of its cores may be used."""

from pathlib import Path

import pytest

from meshwise.comm.launch import launch


@pytest.mark.parametrize(
    "share, expected", [("max 100000", 3), ("150000 100000", 2), ("20000 100000", 1), ("900000 100000", 3), (None, 3)]
)
def test_cores_are_those_that_this_process_may_use(
    share: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cpu.max"
    if share is not None:
        place.write_text(f"{share}\n")
    monkeypatch.setattr(launch, "_SHARE", place)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 5, 7}, raising=False)

    assert launch.cores() == expected

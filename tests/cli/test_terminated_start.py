"""A command that is ended while it starts its ranks: nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from warm_command import WarmCommand

pytestmark = pytest.mark.processes

SECONDS = 200.0
JOB = """
plan = "dp=2"
model.arguments = { layers = 1, heads = 2, width = 32 }
data = { files = ["text.txt"], context = 16, cache = "cache" }
train = { batch = 8, steps = 100000, output = "run" }
"""


@pytest.mark.parametrize(
    "end, send, delay",
    [("SIGTERM", os.kill, 0.0), ("SIGHUP", os.killpg, 0.5)],
    ids=["TERM at the start", "terminal closed later"],
)
def test_it_leaves_nothing(end: str, send: Callable[[int, int], None], delay: float, tmp_path: Path) -> None:
    temporary = tmp_path / "t"
    temporary.mkdir()
    (tmp_path / "text.txt").write_text("plain words " * 200)
    (tmp_path / "job.toml").write_text(JOB)
    process = WarmCommand("meshwise", "train", "job.toml", folder=tmp_path, variables={"TMPDIR": str(temporary)})
    until = time.monotonic() + SECONDS
    while not list(temporary.glob("meshwise-*")) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(delay)
    send(process.pid, signal.Signals[end])
    process.communicate(timeout=SECONDS)
    assert process.wait(0) == -signal.Signals[end]
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")] == []

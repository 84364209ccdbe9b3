"""Test the start of a run: signals that it must ignore, and one output for all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import script_processes
from meshwise.comm.api.launcher_info import RankKilledError
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run

pytestmark = pytest.mark.processes

SECONDS = 200.0
WAITING = """
import sys, time
from pathlib import Path
from meshwise.comm.launch.launch import run

def waits(world, folder):
    world.barrier()
    print("met", world.rank)
    (folder / f"{world.rank} is here").touch()
    while not (folder / "go on").exists():
        time.sleep(0.02)
    return world.rank

if __name__ == "__main__":
    returned = run(2, waits, args=(Path(sys.argv[1]),))
    (Path(sys.argv[1]) / "returned").write_text(str(returned))
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts ranks that wait, once they are there. It is given what a shell does before it becomes that process."""
    started: list[subprocess.Popen[str]] = []

    def start(first: str) -> subprocess.Popen[str]:
        (tmp_path / "waiting.py").write_text(WAITING)
        words = [sys.executable, str(tmp_path / "waiting.py"), str(tmp_path)]
        process = subprocess.Popen(
            ["sh", "-c", f'{first}; exec "$@"', "sh", *words],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(process)
        until = time.monotonic() + SECONDS
        while len(list(tmp_path.glob("* is here"))) < 2 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def returned(process: subprocess.Popen[str], folder: Path) -> tuple[int, str, str, str]:
    """Let the ranks go on: the status, what was said, and what they returned."""
    (folder / "go on").touch()
    out, errors = process.communicate(timeout=SECONDS)
    result = folder / "returned"
    return process.returncode, out, errors, result.read_text() if result.exists() else ""


def test_signals_that_a_run_was_started_to_ignore_end_neither_it_nor_its_ranks(
    tmp_path: Path, waiting: Callable[[str], subprocess.Popen[str]]
) -> None:
    """As `nohup` starts it, and a script that goes on beside it."""
    process = waiting("trap '' HUP INT")
    for ignored in (signal.SIGHUP, signal.SIGINT):
        os.killpg(process.pid, ignored)
        time.sleep(0.5)
    status, _, errors, result = returned(process, tmp_path)
    assert (status, errors, result) == (0, "", "[0, 1]")


def prints(world: World, times: int) -> None:
    world.barrier()
    for _ in range(times):
        print("a line", "of rank", world.rank)
    world.barrier()
    if times == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def lines(times: int) -> Counter[str]:
    return Counter({f"a line of rank {rank}": times for rank in range(4)})


def test_ranks_print_whole_lines_however_they_end(capfd: pytest.CaptureFixture[str]) -> None:
    run(4, prints, args=(2000,))
    assert Counter(capfd.readouterr().out.splitlines()) == lines(2000)
    with pytest.raises(RankKilledError):
        run(4, prints, args=(1,))
    assert Counter(capfd.readouterr().out.splitlines()) == lines(1)


PRINTING = """
from meshwise.comm.launch.launch import run

def prints(world):
    world.barrier()
    for _ in range(2000):
        print("a line", "of rank", world.rank)

if __name__ == "__main__":
    run(4, prints)
"""


def test_ranks_of_a_script_without_buffers_print_whole_lines_too(tmp_path: Path) -> None:
    done = script_processes.ended(PRINTING, folder=tmp_path, PYTHONUNBUFFERED="1")
    assert Counter(done.stdout.splitlines()) == lines(2000)

"""What is left of a job that is ended from outside, and not once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import process
from pathlib import Path

import pytest

from meshwise.comm.launch import job_semaphores as semaphores
from meshwise.comm.launch.job_folder import job_folder
from scripts import ended

pytestmark = pytest.mark.processes

SIZE = 2
SECONDS = 200.0

LIVING = """
import time
from meshwise.comm import run

def main(world):
    world.barrier()
    if not world.rank:
        print("running", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    run({size}, main)
"""

# What there is of semaphores at each start, and how one is called that a rank makes.
STARTED_AGAIN = """
import multiprocessing, os, tempfile
from meshwise.comm import run
from meshwise.comm.api.job_attempt import JobAttempt

def main(world):
    world.barrier()
    if not world.rank:
        folders = {{name for name in os.listdir(tempfile.gettempdir()) if name.startswith("meshwise-job-")}}
        named = [name for name in os.listdir("/dev/shm") if name[4:].rpartition("-")[0] in folders]
        own = multiprocessing.get_context("spawn").Lock()
        print(len(named), own._semlock.name.startswith("/mp-"), flush=True)
    world.barrier()
    if not JobAttempt.current().number:
        os._exit(1)

if __name__ == "__main__":
    run({size}, main, restarts=1)
"""

# As a notebook's, which starts its ranks in no time.
IMPATIENT = """
import atexit, os, shutil, signal, sys, time
from meshwise.comm import run

ordinary = shutil.rmtree

def interrupted(folder, **options):
    if os.path.basename(folder).startswith("meshwise-job-"):
        signal.raise_signal(signal.SIGINT)
    return ordinary(folder, **options)

def main(world):
    world.barrier()
    if not world.rank:
        print("running", flush=True)
    time.sleep(1000)

shutil.rmtree = interrupted
atexit.register(signal.raise_signal, signal.SIGINT)
run({size}, main)
"""


def start(*command: str, temporary: Path) -> subprocess.Popen[str]:
    """A job in a session of its own, once its ranks run."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "running\n":
        process.kill()
        pytest.fail(f"the ranks did not start\n{process.communicate()[1]}")
    return process


def test_another_ctrl_c_finds_everything_removed_and_nothing_to_say(tmp_path: Path) -> None:
    process = start("-c", IMPATIENT.format(size=SIZE), temporary=tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (-signal.SIGINT, "stopped by Ctrl-C; all ranks have ended\n")
    assert list(tmp_path.glob("meshwise-*")) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="semaphores have no place here")
def test_the_next_job_removes_the_semaphores_of_one_whose_processes_were_all_killed(tmp_path: Path) -> None:
    script = tmp_path / "living.py"
    script.write_text(LIVING.format(size=SIZE))
    process = start(str(script), temporary=tmp_path)
    mapped = [line.split() for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    theirs = {int(words[4]) for words in mapped if words[5:] and words[5].startswith("/dev/shm/sem.")}
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    assert theirs
    with job_folder(tmp_path):
        assert [path for path in Path("/dev/shm").iterdir() if path.lstat().st_ino in theirs] == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="semaphores have no place here")
def test_those_of_one_start_are_gone_at_the_next(tmp_path: Path) -> None:
    said = ended(STARTED_AGAIN.format(size=SIZE), folder=tmp_path, TMPDIR=str(tmp_path))
    count = 2 * SIZE + 5
    assert said.stdout == f"{count} True\n" * 2


def test_jobs_that_start_at_once_leave_the_names_as_they_were(tmp_path: Path) -> None:
    def prefix() -> str:
        return str(vars(process.current_process())["_config"]["semprefix"])

    def start(number: int) -> None:
        with semaphores.named_after(tmp_path / f"job-{number}"):
            seen.append((number, prefix()))
            time.sleep(0.05)
            seen.append((number, prefix()))

    before = prefix()
    seen: list[tuple[int, str]] = []
    starts = [threading.Thread(target=start, args=(number,)) for number in range(3)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join()
    assert sorted(seen) == sorted(2 * [(number, f"/job-{number}") for number in range(3)])
    assert prefix() == before


def test_semaphores_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semaphores, "_PLACE", tmp_path)
    (tmp_path / "meshwise-job-killed").mkdir()
    (tmp_path / "meshwise-job-killed" / "made-by-meshwise").touch()
    for name in ("meshwise-job-killed-abc", "meshwise-job-others-abc", "mp-abc"):
        (tmp_path / f"sem.{name}").touch()
    with job_folder(tmp_path):
        assert {path.name for path in tmp_path.glob("sem.*")} == {"sem.meshwise-job-others-abc", "sem.mp-abc"}

"""What is left of a job that is ended from outside, and not once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SIZE = 2
SECONDS = 200.0

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

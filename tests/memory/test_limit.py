"""A model that is larger than the memory there is: it trains from disk, and without it dies with an answer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.checkpoint.damage import DamageError
from meshwise.memory.swap import TierError
from meshwise.simulate.shortage import ShortageError, is_shortage
from meshwise.train.failure import SAY_ALL

ROOM = 340 * 2**20
JOB = """
[model]
arguments = {width = 640, layers = 5, heads = 4}
[data]
context = 32
files = ["words.txt"]
[train]
steps = 2
batch = 2
[swap]
megabytes = 4
"""
PARAMETERS = 5 * 12 * 640 * 640  # and a little: 16 bytes each are 375 MiB


def train(folder: Path, plan: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.toml").write_text(JOB)
    (folder / "words.txt").write_text("to be or not to be " * 500)
    # What is freed goes back to the system at once, and threads share one heap: what counts is what is in use.
    lean = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    words = [sys.executable, str(Path(__file__).with_name("limited.py")), str(ROOM), "job.toml", "--plan", plan]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, **lean})


def test_a_model_larger_than_the_memory_dies_with_an_answer_and_the_answer_trains(tmp_path: Path) -> None:
    died = train(tmp_path, "dp=1")
    assert died.returncode == 3, died.stdout + died.stderr
    table = {row[0]: row[1] for row in re.findall(r"^  (\w[\w ]*?) {2,}([\d.]+) MiB", died.stdout, flags=re.MULTILINE)}
    states = sum(float(table[kind]) for kind in ("parameters", "gradients", "optimizer"))
    assert 16 * PARAMETERS < states * 2**20 < 1.1 * 16 * PARAMETERS
    assert float(table["in all"]) > float(table["room"])
    answer = re.search(r"the cheapest change that fits: '(.*)' \((.*) MiB\)", died.stdout)
    assert answer is not None, died.stdout
    assert "offload" in answer[1]
    assert float(answer[2]) < float(table["room"])
    trained = train(tmp_path, answer[1])
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "done: 2 steps" in trained.stdout


@pytest.mark.parametrize(
    "error, told",
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (ShortageError("", held={}), True),
        (OSError(28, "No space left on device"), False),
        (RuntimeError("shapes do not match"), False),
        (DamageError([]), False),
    ],
)
def test_what_is_a_shortage_of_memory(error: Exception, *, told: bool) -> None:
    assert is_shortage(error) == told


def test_the_answer_is_told_without_a_traceback_and_so_is_a_broken_disk() -> None:
    assert {ShortageError, TierError} <= set(SAY_ALL)

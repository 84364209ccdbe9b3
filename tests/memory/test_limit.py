"""A model that is larger than the memory there is: it trains from disk, and without it dies with an answer."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwise.checkpoint.damage import DamageError
from meshwise.memory.swap import TierError
from meshwise.simulate.shortage import ShortageError, is_shortage
from meshwise.train.failure import SAY_ALL

ROOM = 85 * 2**20
JOB = """
[model]
arguments = {width = 320, layers = 5, heads = 4}
[data]
context = 32
files = ["words.txt"]
[train]
steps = 2
batch = 2
[swap]
megabytes = 4
"""
PARAMETERS = 5 * 12 * 320 * 320  # and a little: 16 bytes each are 94 MiB


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "words.txt").write_text("to be or not to be " * 500)
    # What is freed goes back to the system at once, and threads share one heap: what counts is what is in use.
    lean = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    words = [sys.executable, str(Path(__file__).with_name("limited.py")), str(ROOM), "job.toml"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, cwd=tmp_path, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env={**os.environ, **lean}
    ) as running:
        yield running


def train(limited: subprocess.Popen[str], plan: str) -> tuple[str, int]:
    """What a run under a plan prints, and its status."""
    assert limited.stdin is not None
    assert limited.stdout is not None
    print(plan, file=limited.stdin, flush=True)
    told = list[str]()
    for line in limited.stdout:
        if ended := re.fullmatch(r"ended (\d+)\n", line):
            return "".join(told), int(ended[1])
        told.append(line)
    pytest.fail("".join(told))


def test_a_model_larger_than_the_memory_dies_with_an_answer_and_the_answer_trains(
    limited: subprocess.Popen[str],
) -> None:
    died, status = train(limited, "dp=1")
    assert status == 3, died
    table = {row[0]: row[1] for row in re.findall(r"^  (\w[\w ]*?) {2,}([\d.]+) MiB", died, flags=re.MULTILINE)}
    states = sum(float(table[kind]) for kind in ("parameters", "gradients", "optimizer"))
    assert 16 * PARAMETERS < states * 2**20 < 1.1 * 16 * PARAMETERS
    assert float(table["in all"]) > float(table["room"])
    answer = re.search(r"the cheapest change that fits: '(.*)' \((.*) MiB\)", died)
    assert answer is not None, died
    assert "disk" in answer[1]
    assert float(answer[2]) < float(table["room"])
    trained, status = train(limited, answer[1])
    assert status == 0, trained
    assert "done: 2 steps" in trained


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

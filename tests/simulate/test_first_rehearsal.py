"""The first rehearsal of a process tells what any later one tells."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

TWICE = """
import json
from meshwise.simulate.rehearsal import rehearse
from simulate.subjects import CONFIG, gpt_subject

def tapes(plan, ranks, device):
    return rehearse(gpt_subject(CONFIG), plan=plan, ranks=ranks, device=device, shared=False).tapes

plans = ("tp=2 dp=2 zero=3 precision=fp16", 4, "cuda"), ("pp=2 dp=2 zero=1 microbatches=4 random=global", 4, "cpu")
print(json.dumps([first == second for first, second in [[tapes(*plan) for _ in range(2)] for plan in plans]]))
"""


def test_the_first_rehearsal_of_a_process_has_the_same_tapes_as_the_second() -> None:
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{TWICE}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert json.loads(done.stdout) == [True, True]

"""The first rehearsal of a process tells what any later one tells."""

import json

import pytest

from warm_command import WarmCommand

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
    """It is forked from one that has rehearsed nothing."""
    _, told, errors = WarmCommand("-c", TWICE).end()
    assert errors == ""
    assert json.loads(told) == [True, True]

"""The examples run, and show what they say that they show."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshwise.plan import Plan
from meshwise.testing import run

EXAMPLES = Path(__file__).parents[1] / "examples"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "plan", ["pp=2 tp=2 microbatches=4 schedule=1f1b", "pp=4 microbatches=8 schedule=zb-v virtual_stages=2"]
)
def test_the_split_backward_has_the_gradients_of_one_process(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan in (EXAMPLES / "split_backward.py").read_text()
    assert max(run(Plan.parse(plan).mesh().size, loaded("split_backward").main, args=(plan,))) < 1e-12
    told = capsys.readouterr().out
    assert "48 gradients, the largest relative difference from one process:" in told
    assert "bubble" in told


@pytest.mark.processes
def test_the_split_backward_is_a_program() -> None:
    """Under the plan that it names first. Its status says that the gradients are those of one process."""
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "split_backward.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "48 gradients" in ended.stdout

"""Test that the examples run and print the results that they describe."""

import importlib.util
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
    output = capsys.readouterr().out
    assert "48 gradients, the largest relative difference from one process:" in output
    assert "bubble" in output


@pytest.mark.processes
def test_the_split_backward_is_a_program(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Under the plan that it names first. Its status says that the gradients are those of one process."""
    path = EXAMPLES / "split_backward.py"
    program = ModuleType("__main__")
    program.__file__ = str(path)
    for name in ("__main__", "__mp_main__"):  # by the second multiprocessing knows it
        monkeypatch.setitem(sys.modules, name, program)
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit) as ended:
        exec(compile(path.read_text(), path, "exec"), vars(program))
    assert not ended.value.code
    assert "48 gradients" in capfd.readouterr().out

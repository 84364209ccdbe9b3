"""Test that docs/api.md has every public name, says what the code says, and that its examples run."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

import meshwise as mw
from api_page import EXAMPLES, PAGE, PREAMBLE, PROCESSES, page, run_examples


def test_every_public_name_has_an_example() -> None:
    assert sorted(EXAMPLES) == sorted({*mw.__all__} - {"__version__"})


def test_the_page_is_as_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/api.md differs from the code; run `make docs`"


@pytest.mark.filterwarnings("ignore")
def test_the_examples_run() -> None:
    run_examples(tuple(name for name in EXAMPLES if name not in PROCESSES))


@pytest.mark.processes
@pytest.mark.parametrize("name", PROCESSES)
def test_the_examples_of_processes_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scripts of this process, whose ranks come from a server that has imported torch already."""
    script = tmp_path / "script.py"
    example = EXAMPLES[name]
    if "__main__" not in example:
        definitions, _, call = example.partition("\n\n\n")
        guarded = "\n".join(f"    {line}" for line in call.split("\n"))
        example = f'{definitions}\n\n\nif __name__ == "__main__":\n{guarded}'
    script.write_text(f"{PREAMBLE}\n\n{example}\n")
    monkeypatch.chdir(tmp_path)
    program = ModuleType("__main__")
    program.__file__ = str(script)
    for module in ("__main__", "__mp_main__"):  # by the second multiprocessing knows it
        monkeypatch.setitem(sys.modules, module, program)
    exec(compile(script.read_text(), script, "exec"), vars(program))

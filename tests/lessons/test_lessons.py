"""Test that the lessons run, that their exercises are checked, and that the course covers every row of the mission."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from lesson_solutions import SOLUTIONS
from meshwise.cli.lesson_command import find_lessons, read_cells, run_lesson, title_of
from meshwise.cli.main import main

ROOT = Path(__file__).parents[2]
LESSONS = find_lessons(ROOT / "lessons")
LONG = "23"
"""Its rehearsal takes 12 s of a core; `make lessons` runs it."""

pytestmark = pytest.mark.threads("a lesson starts its own threads")


def exercise_of(number: str) -> dict[str, Any]:
    """Return the names of a lesson after its last cell of code; of the long lesson, of this cell alone."""
    [path] = [path for path in LESSONS if path.name.startswith(number)]
    if number == LONG:
        names: dict[str, Any] = {}
        exec([cell for cell in read_cells(path) if not cell.is_text][-1].text, names)
        return names
    return runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("number", [path.name[:2] for path in LESSONS])
def test_a_lesson_runs_and_checks_its_exercise(
    number: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "lessons"))
    names = exercise_of(number)
    wrong = names["check"](names["answer"])
    assert wrong, "the answer that the lesson begins with must be wrong"
    assert capsys.readouterr().out.endswith(f"{wrong}\n")
    assert names["check"](SOLUTIONS[number]) == ""


def test_every_lesson_has_its_parts() -> None:
    assert [path.name[:2] for path in LESSONS] == sorted(SOLUTIONS) == [f"{at:02}" for at in range(1, len(LESSONS) + 1)]
    for path in LESSONS:
        text = path.read_text()
        assert re.match(rf"# %% \[markdown\]\n# # {int(path.name[:2])}\. ", text), path
        assert re.search(r"^# Papers?: ", text, re.MULTILINE), f"{path.name}: the paper"
        assert text.count("# ## Exercise\n") == 1, path
        assert re.search(r"^#     .*[=≥]|^#     \w", text, re.MULTILINE), f"{path.name}: a formula, table or drawing"
        assert "assert" in text.partition("# ## Exercise")[0], f"{path.name}: a claim that can fail"
        assert max(map(len, text.splitlines())) <= 120, path


BY_HAND = {path.name[:2] for path in LESSONS} - {"01", "09", "10", "18", "20", "23"}


def test_lessons_about_ranks_do_it_by_hand_and_with_the_library() -> None:
    """The others have nothing to send: a device, a file, a function, a table, a formula."""
    for path in LESSONS:
        text = path.read_text()
        assert ("import torch.distributed as dist" in text) == (path.name[:2] in BY_HAND), path
        assert "by hand" in text.lower() or path.name[:2] in ("01", "22"), path


def test_the_course_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{path.name[:2]}  {title_of(path)}" in listed for path in LESSONS)


def test_an_unknown_lesson_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", "77"]) == 2
    assert capsys.readouterr().err == "meshwise lesson: no lesson '77'; the lessons are 01 to 23, or all\n"


def test_a_folder_without_lessons_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", "--folder", str(tmp_path)]) == 2
    assert f"no lessons in {tmp_path}" in capsys.readouterr().err


LESSON = """# %% [markdown]
# # 1. A sum
#
# Text with `code`.

# %%
from pathlib import Path
import os
print("the sum is", 1 + 1)
Path(os.environ["MESHWISE_LESSON_PICTURES"], "00.svg").write_text("<svg>a</svg>")

# %%
assert 1 + 1 == 2
"""


def test_a_page_has_text_code_output_and_pictures(tmp_path: Path) -> None:
    (tmp_path / "01_sum.py").write_text(LESSON)
    page = tmp_path / "page.html"
    assert main(["lesson", "1", "--folder", str(tmp_path), "--html", str(page)]) == 0
    shown = page.read_text()
    for part in ("<h1>1. A sum</h1>", "<code>code</code>", "1 + 1", "the sum is 2", "<figure><svg>a</svg></figure>"):
        assert part in shown, part


def test_a_lesson_is_shown_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "01_sum.py").write_text(LESSON)
    assert main(["lesson", "01", "--folder", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.index("Text with code") < shown.index("1 + 1") < shown.index("the sum is 2")


def test_a_claim_that_fails_ends_the_lesson_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "01_sum.py"
    path.write_text(LESSON.replace("== 2", "== 3"))
    with pytest.raises(AssertionError) as failed:
        list(run_lesson(path))
    assert failed.traceback[-1].lineno + 1 == LESSON.splitlines().index("assert 1 + 1 == 2") + 1
    assert str(tmp_path) not in sys.path
    assert main(["lesson", "01", "--folder", str(tmp_path)]) == 1
    assert "AssertionError" in capsys.readouterr().err


@pytest.mark.processes
def test_lessons_run_on_processes(capfd: pytest.CaptureFixture[str]) -> None:
    """One of them here; `make lessons` runs all."""
    assert main(["lesson", "12", "--processes"]) == 0
    printed = capfd.readouterr().out
    assert printed.count("by hand: Z, dX, dW and dV of one process") == 1, "rank 0 alone prints"


# ---- the mission -----------------------------------------------------------------------------------------------------

MISSION = {  # what a user should learn or do: words of its lesson, its page, and an entry of the API with a word of it
    "collectives and their bandwidths": ("Nine collectives", "view.md", "World all_to_all"),
    "how collectives are made": ("An all-reduce is", "architecture.md", "World reduce_scatter"),
    "data parallel training": ("Data parallel training by hand", "architecture.md", "parallelize dp=auto"),
    "overlap of communication": ("Buckets and overlap", "architecture.md", "measure trainer"),
    "large batches": ("Batch size and learning rate", "large_batch.md", "StepResult noise"),
    "stale gradients": ("Stale gradients", "glossary.md", "Plan sync="),
    "sharded state": ("ZeRO 1, 2 and 3", "plans.md", "Plan zero="),
    "state on other tiers": ("Tiers", "memory.md", "SwapConfig folder"),
    "recomputation": ("Recomputation", "memory.md", "Plan recompute="),
    "half precision": ("Half precision", "precision.md", "LossScale"),
    "tensor parallelism": ("Tensor parallel, forward and backward", "tensor.md", "Plan tp="),
    "1D, 2D, 2.5D, 3D": ("From 1D to 3D", "tensor.md", "Plan tp_mode="),
    "sequence parallelism": ("Sequence parallel", "tensor.md", "Plan sequence_parallel="),
    "long sequences": ("Context parallel: ring attention", "context.md", "Plan context="),
    "mixtures of experts": ("Mixtures of experts", "experts.md", "Trainer expert_imbalances"),
    "pipelines": ("A pipeline, forward and backward", "pipeline.md", "CutOptions"),
    "schedules": ("Schedules are tables", "pipeline.md", "Plan schedule="),
    "all axes together": ("Three axes at once", "plans.md", "Mesh coordinate"),
    "choosing a plan": ("Choosing a plan", "planner.md", "needs"),
    "checkpoints, faults, restarts": ("Faults and resume", "faults.md", "Trainer restore"),
    "fewer bytes": ("Fewer bytes", "plans.md", "Plan wire="),
    "a trillion parameters": ("A trillion parameters", "simulation.md", "needs"),
    "starting on a cluster": ("Faults and resume", "clusters.md", "connect"),
    "hardware and links": ("Hardware and links", "simulation.md", "measure"),
}


def test_every_row_of_the_mission_has_a_lesson_a_page_and_an_entry_of_the_api() -> None:
    entries = dict(
        re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (ROOT / "docs/api.md").read_text(), re.MULTILINE | re.DOTALL)
    )
    titles = [title_of(path) for path in LESSONS]
    used = set()
    for row, (lesson, page, api) in MISSION.items():
        entry, _, word = api.partition(" ")
        assert word in entries[entry], f"{row}: {api}"
        found = [title for title in titles if lesson in title]
        assert len(found) == 1, f"{row}: {found}"
        used |= set(found)
        assert (ROOT / "docs" / page).exists(), f"{row}: {page}"
    assert used == set(titles), "a lesson that no row names"
    listed = (ROOT / "docs" / "lessons.md").read_text()
    for path in LESSONS:
        assert f"[{title_of(path)}](../lessons/{path.name})" in listed, f"docs/lessons.md: {path.name}"

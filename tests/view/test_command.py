"""`meshwise simulate` and `meshwise draw mesh`: what is drawn, compared and written."""

import json
import sys
from pathlib import Path

import pytest

from meshwise.cli.main import main
from meshwise.pipeline.run.measured_step import MeasuredStep
from view.accounts import SPLIT, account, prediction

JOB = ["simulate", "--model.arguments", "layers=2", "width=16", "heads=2", "--data.context=8", "--train.batch=8"]
JOB += ["--data.files", __file__]
PLAN = "--plan=pp=2 microbatches=2 partition=params"
ON = "--on=1x2 h100"


def test_plans_are_compared_drawn_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, trace, svg = tmp_path / "new" / "a.html", tmp_path / "a.json", tmp_path / "a.svg"
    words = [*JOB, PLAN, ON, "--compare", "dp=2 zero=3", "--draw", f"--html={html}", f"--trace={trace}", f"--svg={svg}"]
    assert main(words) == 0
    out = capsys.readouterr().out
    first = next(line for line in out.splitlines() if line.lstrip().startswith("zero "))
    assert first.split() == ["zero", "0", "3"]
    assert "rank 1 │" in out  # of the pipeline
    assert "ranks 0–1 │" in out  # of the replicas
    assert html.read_text().count('<section class="plan"') == 2
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1, 2}
    assert "dp=2 zero=3" in svg.read_text()


def test_one_plan_is_drawn_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--plan=dp=2", ON, "--draw"]) == 0
    out = capsys.readouterr().out
    assert "utilisation" in out
    assert "ranks 0–1 │" in out


def test_a_measured_step_is_shown_with_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = account(SPLIT).timeline
    MeasuredStep(prediction(SPLIT).rehearsal.schedule, step).write(tmp_path / "timeline.json")
    assert main([*JOB, "--plan=dp=2", ON, f"--run={tmp_path}", f"--html={tmp_path / 'a.html'}"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    seconds = next(line for line in lines if line[:1] == ["step"])
    assert float(seconds[3]) == pytest.approx(1e3 * step.seconds, rel=1e-3)
    assert 'data-row="rank 1"' in (tmp_path / "a.html").read_text()


def test_a_mesh_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mesh.svg"
    assert main(["draw", "mesh", "--plan=pp=2 dp=auto tp=2", "--on=2x4 h100", f"--svg={path}"]) == 0
    assert "dp 1 │ 6  7" in capsys.readouterr().out
    assert "8 ranks, 4 to a node" in path.read_text()


BAD = [
    ([*JOB, "--compare", "dp=2"], "drawings and comparisons need the times of a cluster: name it, as in --on"),
    ([*JOB, "--html=a.html"], "drawings and comparisons need the times of a cluster"),
    ([*JOB, ON, "--run=/nowhere"], "/nowhere is not there; train with --train.timeline=3"),
    ([*JOB, ON, "--measure"], "--measure without --memory has no effect"),
    (JOB, "nothing to predict: give --memory, or --on with a cluster"),
    ([*JOB, ON, "--compare", "dp=2 zro=3"], "unknown plan key 'zro'; did you mean zero?"),
    (["draw", "mesh"], "give a plan: meshwise draw mesh --plan"),
    (["draw", "mesh", "--plan=dp=2", "--svg=/proc/none/a.svg"], "cannot write /proc/none/a.svg"),
    (["draw", "mesh", "--plan=dp=auto"], "dp=auto fills a cluster: name it"),
    (["draw", "mesh", "--plan=dp=3", "--on=2x4 h100"], "needs 3 ranks, but the world has 8"),
    (["draw", "mesh", "--plan=dp=3", "--on=2x4 h1"], "did you mean h100"),
    (["draw", "mesh", f"--on={'9' * 400} h100", "--plan=dp=auto"], "has more ranks than 1048576"),
    (["draw", "mesh", "--on=1000000x8 h100", "--plan=dp=auto"], "has more ranks than 1048576"),
    (["draw", "mesh", "--on=/", "--plan=dp=auto"], "/ cannot be read: Is a directory; name a TOML file"),
    (["draw", "mesh", "--plan=dp=2", "--svg=/"], "cannot write /: it is a folder; name a file in it"),
    ([*JOB, ON, f"--html={__file__}/a.html"], f"no permission to write to it or to {__file__}"),
    (["draw", "schedule", f"--table={__file__}.gone"], f"{__file__}.gone cannot be read: No such file"),
    (["draw", "schedule", f"--table={sys.executable}"], f"{sys.executable} must be a UTF-8 table of actions"),
    *((["draw", "schedule", "--plan=pp=2", f"--{key}={value}"], "times have to be above 0, and --link at least 0")
      for key in ("forward", "input", "weight", "link") for value in ("-1",)),
]  # fmt: skip


@pytest.mark.parametrize("words, message", BAD)
def test_a_drawing_that_fails_is_one_message_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_a_picture_that_needs_matplotlib_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshwise.cli.shared_flags.find_spec", lambda _: None)
    assert main([*JOB, ON, "--png=a.png"]) == 2
    assert "pip install 'meshwise[plot]'" in capsys.readouterr().err

"""Test the table of experts that `meshwise draw experts` prints, over the layouts of the Switch paper's figure 9."""

import json
from pathlib import Path

import pytest

from meshwise.cli.main import main
from meshwise.plan import Plan
from meshwise.view.text_pictures import expert_table

TABLES = {
    "dp=2": """
        rank  stage    rows  tokens  experts  inner  same on ranks
        0       all  1 of 2     all      0-3    all            0 1
        1       all  2 of 2     all      0-3    all            0 1
    """,
    "dp=2 ep=2": """
        rank  stage    rows  tokens  experts  inner  same on ranks
        0       all  1 of 2     all      0-1    all              0
        1       all  2 of 2     all      2-3    all              1
    """,
    "tp=2 etp=2": """
        rank  stage  rows  tokens  experts   inner  same on ranks
        0       all   all     all      0-3  1 of 2              0
        1       all   all     all      0-3  2 of 2              1
    """,
    "dp=2 tp=2 etp=2": """
        rank  stage    rows  tokens  experts   inner  same on ranks
        0       all  1 of 2     all      0-3  1 of 2            0 2
        1       all  1 of 2     all      0-3  2 of 2            1 3
        2       all  2 of 2     all      0-3  1 of 2            0 2
        3       all  2 of 2     all      0-3  2 of 2            1 3
    """,
    "dp=2 tp=2 ep=2": """
        rank  stage    rows  tokens  experts  inner  same on ranks
        0       all  1 of 2  1 of 2      0-1    all            0 2
        1       all  1 of 2  2 of 2      2-3    all            1 3
        2       all  2 of 2  1 of 2      0-1    all            0 2
        3       all  2 of 2  2 of 2      2-3    all            1 3
    """,
    "dp=2 tp=2 ep=2 etp=2": """
        rank  stage    rows  tokens  experts   inner  same on ranks
        0       all  1 of 2     all      0-1  1 of 2              0
        1       all  1 of 2     all      0-1  2 of 2              1
        2       all  2 of 2     all      2-3  1 of 2              2
        3       all  2 of 2     all      2-3  2 of 2              3
    """,
    "dp=2x2 ep=2 zero=3": """
        rank  stage    rows  tokens  experts  inner  same on ranks
        0       all  1 of 4     all      0-1    all          0 | 2
        1       all  2 of 4     all      2-3    all          1 | 3
        2       all  3 of 4     all      0-1    all          0 | 2
        3       all  4 of 4     all      2-3    all          1 | 3
    """,
    "dp=2x4 ep=2 zero=3": """
        rank  stage    rows  tokens  experts  inner  same on ranks
        0       all  1 of 8     all      0-1    all      0 2 | 4 6
        1       all  2 of 8     all      2-3    all      1 3 | 5 7
        2       all  3 of 8     all      0-1    all      0 2 | 4 6
        3       all  4 of 8     all      2-3    all      1 3 | 5 7
        4       all  5 of 8     all      0-1    all      0 2 | 4 6
        5       all  6 of 8     all      2-3    all      1 3 | 5 7
        6       all  7 of 8     all      0-1    all      0 2 | 4 6
        7       all  8 of 8     all      2-3    all      1 3 | 5 7
    """,
}


@pytest.mark.parametrize("plan", TABLES)
def test_each_rank_has_a_line(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [line.removeprefix(" " * 8) for line in TABLES[plan].splitlines()[1:-1]]
    assert expert_table(Plan.parse(plan), experts=4).splitlines() == expected
    assert main(["draw", "experts", "--plan", plan, "--experts", "4"]) == 0
    assert capsys.readouterr().out.splitlines() == expected


def test_many_ranks_are_cut_off_and_few_experts_refused() -> None:
    assert expert_table(Plan.parse("dp=64 ep=8"), experts=8).splitlines()[-1] == "… 32 more ranks"
    assert main(["draw", "experts", "--plan", "dp=4 ep=4", "--experts", "2"]) == 2
    assert main(["draw", "experts", "--plan", "dp=auto"]) == 2


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["job.toml", "--plan", "dp=2"],
            "'job.toml': this command reads no job file; give its flags: --plan --experts",
        ),
        (["--plan", "dp=2", "--experts", "0"], "--experts is 0, but ep=1 needs 1 or more; give --experts 1"),
        (["--plan", "dp=4 ep=4", "--experts", "2"], "--experts is 2, but ep=4 needs 4 or more; give --experts 4"),
        (["--plan", "experts=0"], "unknown plan key 'experts'; the keys are dp tp"),
    ],
)
def test_wrong_words_are_explained(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "experts", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_loads_of_a_run_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        {"event": "start"},
        {"event": "expertload", "step": 2, "mixtures": {"0.mlp": 1.0, "1.mlp": 2.0}},
        {"event": "expertload", "step": 4, "mixtures": {"0.mlp": 1.5, "1.mlp": 3.0}},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, events)))
    assert main(["draw", "load", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "steps 2 to 4"
    assert [line.split() for line in said[2:]] == [["0.mlp", "▁▃", "1.50"], ["1.mlp", "▅█", "3.00"]]
    path.write_text(json.dumps(events[0]))
    assert main(["draw", "load", str(tmp_path)]) == 2
    assert "has no loads of experts" in capsys.readouterr().err

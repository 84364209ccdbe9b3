"""How far from perfect: who is measured against which bar, and one small run."""

from __future__ import annotations

from pathlib import Path

import pytest

import contestants
from bench.warm_team import start
from ideal import ENTRIES, Distance, Entry, command, main, parse
from team import Team

SMALL = ["layers=1", "width=32", "heads=2", "sequence=16", "vocabulary=64", "batch=8"]


def entry(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.contestant.name == name)


def test_every_way_of_splitting_has_a_bar_for_ours_and_a_peer_that_needs_nothing_but_torch() -> None:
    ours = {entry.split for entry in ENTRIES if entry.contestant.package == "meshwise"}
    peers = {entry.split for entry in ENTRIES if entry.contestant.package == "torch"}
    assert peers == {*ours, "nothing"}
    assert ours == {*(f"data, ZeRO {stage}" for stage in range(4)), "tensor", "pipeline"}
    assert all((entry.contestant.package == "meshwise") == (entry.bar is not None) for entry in ENTRIES)


def test_no_file_beside_the_contestants_hides_a_peer() -> None:
    folder = Path(contestants.__file__).parent
    assert not {entry.contestant.package for entry in ENTRIES} & {file.stem for file in folder.glob("*.py")}


def test_a_pipeline_is_held_to_its_bubble() -> None:
    assert entry("meshwise 1f1b").bar == pytest.approx(1.06 * 11 / 8)
    assert entry("meshwise zb-h1").bar == pytest.approx(11 / 8)


def test_median_and_best_step_are_held_against_the_bar_at_the_number_of_ranks_it_is_for() -> None:
    near = Distance(entry("meshwise zero=1"), median=1.07, best=1.04, processor=1.01, megabytes=700.4)
    assert near.row(ranks=4).endswith("| 1.070 | **1.040** | 1.010 | 700 | 1.050 | best |")
    assert Distance(near.entry, 1.05, 1.04, 1.0, 700).row(ranks=4).endswith("| 1.050 | yes |")
    assert Distance(near.entry, 1.05, 1.06, 1.0, 700).row(ranks=4).endswith("| 1.050 | median |")
    assert Distance(near.entry, 1.07, 1.06, 1.0, 700).row(ranks=4).endswith("| 1.050 | no |")
    assert near.row(ranks=2).endswith("| 1.010 | 700 |  |  |")
    assert Distance(entry("torch DDP"), 1.2, 1.1, 1.0, 700).row(ranks=4).endswith("| 1.000 | 700 |  |  |")


def test_the_command_on_the_page_has_no_path_of_a_machine() -> None:
    words = ["--only", "ZeRO 1", "--python", "megatron=/home/someone/bin/python"]
    assert command(parse(words)) == (
        "python benchmarks/ideal.py --ranks 4 --turns 8 --together 3 --only 'ZeRO 1' --python megatron=PYTHON"
    )


def test_bad_arguments_end_with_one_line() -> None:
    with pytest.raises(SystemExit, match="no such contestant; there are torch, apart, "):
        main(["--only", "nobody"])
    with pytest.raises(SystemExit, match="a key of deepspeed, fairscale, megatron"):
        main(["--python", "fastmoe=/x"])


@pytest.mark.processes
def test_a_small_run_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that exchange nothing are held to the first loss only."""
    monkeypatch.setattr(Team, "_start", start)
    page = tmp_path / "benchmarks.md"
    page.write_text("<!-- ideal: begin -->\n<!-- ideal: end -->\n")
    chosen = ["--only", "apart, micro", "--only", "meshwise zero=2"]
    words = ["--ranks", "1", "--turns", "1", *chosen, "--docs", str(page)]

    status = main([*words, *(word for size in SMALL for word in ("--shape", size))])

    told = capsys.readouterr()
    assert status == 0, told.err
    assert "| nothing | torch, apart, micro-batches |" in told.out
    assert "| data, ZeRO 2 | meshwise zero=2 | `dp=N zero=2` |" in page.read_text()

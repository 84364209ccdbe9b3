"""The table of collectives in the documentation: multiples, bars, and one small run."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives import Cell, main, table
from meshwise.bench.collective_benchmark import Measurement

MIB = 1 << 20


def measured(kind: str, on: str, seconds: float, size: int = 16 * MIB) -> Measurement:
    return Measurement(kind, 4, size, seconds, seconds, on)


def test_a_cell_is_a_multiple_of_gloo_and_a_number_of_copies() -> None:
    rounds = [("all_reduce", "ordinary", 4.0), ("all_reduce", "shared", 1.5), ("all_reduce", "gloo", 10.0)]
    text = table([measured(*one) for one in [*rounds, ("copy", "ordinary", 1.0)]], remarks=["a remark"])
    assert text.splitlines() == [
        "| collective | ranks | tensors | 16 MiB |",
        "|---|---|---|---|",
        "| `all_reduce` | 4 | ordinary | **2.5** |",
        "| `all_reduce` | 4 | shared | **6.7** [1.5] |",
        "",
        "- a remark",
    ]


@pytest.mark.parametrize(
    "cell, text",
    [
        (Cell("ordinary", 4 << 10, gloo=4.9, copies=50.0), "4.9 (bar 5)"),
        (Cell("shared", 64 << 10, gloo=5.0, copies=20.0), "**5.0**"),
        (Cell("ordinary", MIB, gloo=1.0, copies=9.0), "1.0"),
        (Cell("ordinary", 16 * MIB, gloo=1.9, copies=9.0), "1.9 (bar 2)"),
        (Cell("shared", 64 * MIB, gloo=7.0, copies=2.1), "**7.0** [2.1 (bar 2)]"),
        (Cell("joint", 64 * MIB, gloo=5.9, copies=0.1), "5.9 (bar 6)"),
    ],
)
def test_what_misses_its_bar_says_so(cell: Cell, text: str) -> None:
    assert str(cell) == text


@pytest.mark.processes
def test_a_small_run_is_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text("<!-- collectives: begin -->\n<!-- collectives: end -->\n")
    words = ["--ranks", "2", "--groups", "2", "--sizes", "4K", "--rounds", "1", "--docs", str(page)]
    assert main(words) == 0
    assert "| `reduce_scatter` | 2 | shared |" in page.read_text()
    assert "--ranks 2 --groups 2 --sizes 4K --rounds 1" in capsys.readouterr().out

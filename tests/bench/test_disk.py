"""`meshwise bench disk`: every contestant moves the same bytes, and nothing is left behind."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwise.bench.disk import DDS, KINDS, TIER, Disk, Rate, measure
from meshwise.cli.bench_command import main
from meshwise.memory import swap_file as swap
from meshwise.train.job import JobError

pytestmark = pytest.mark.skipif(shutil.which("dd") is None, reason="needs dd")
MIB = 2**20


def test_the_tier_moves_as_many_bytes_as_dd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {"preadv": 0, "pwritev": 0}

    def counted(name: str) -> Any:
        real = getattr(os, name)

        def call(file: int, data: list[Any], offset: int) -> int:
            count: int = real(file, data, offset)
            moved[name] += count
            return count

        return call

    for name in moved:
        monkeypatch.setattr(os, name, counted(name))
    disk = measure(tmp_path, size=40 * MIB, rounds=1)
    assert moved["preadv"] == 2 * 32 * MIB  # alone and both at once; sizes are whole blocks of 16 MiB
    assert moved["pwritev"] - swap.BLOCK * disk.direct == 4 * 32 * MIB  # and twice before, once where it reads
    assert {(rate.who, rate.kind) for rate in disk.rates} == {
        (who, kind) for who in (TIER, *(f"dd × {number}" for number in DDS)) for kind in KINDS
    }
    assert all(rate.median > 0 for rate in disk.rates)
    assert list(tmp_path.iterdir()) == []


def test_the_share_is_that_of_the_best_dd_round_by_round() -> None:
    rates = (
        Rate("dd × 1", "read", (1.0, 1.0, 1.0)),
        Rate("dd × 2", "read", (2.0, 4.0, 4.0)),
        Rate(TIER, "read", (4.0, 4.0, 2.0)),
    )
    assert Disk(rates, direct=True).share("read") == 1.0


def test_the_command_prints_a_table_and_writes_the_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tmp_path / ("told in a folder [whose] name is longer than a line" * 3) / "disk.json"
    words = ["disk", "--folder", str(tmp_path), "--size", "16M", "--rounds", "1", "--json", str(told)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "both at once" in said
    assert "meshwise / best of dd" in said
    assert said.endswith(f"\nwrote {told}\n")
    rates = json.loads(told.read_text())["rates"]
    assert len(rates) == len(KINDS) * (1 + len(DDS))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--folder", "/nowhere"], "no swap file can be made in /nowhere: No such file"),
        (["--size", "900000G"], "bytes free, and four files of .* are needed; give a smaller size"),
        (["--size", "much"], "'much' is not a size"),
        (["--rounds", "0"], "rounds = 0 has to be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_said(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=message):
        main(["disk", "--folder", str(tmp_path), *words])
    assert list(tmp_path.iterdir()) == []

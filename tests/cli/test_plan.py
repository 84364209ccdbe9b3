"""`meshwise plan`: a job and a cluster in, the quickest plans out; and what a run says when it was planned."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from meshwise.cli.main import main
from meshwise.cli.plan_command import _closest
from meshwise.cli.plan_command import main as plan_main
from meshwise.plan import Plan
from meshwise.planner.lower_bound import PlanFigures
from meshwise.planner.plan_search import Candidate, EstimateLevel, SearchResult
from meshwise.train.flags_and_toml import from_toml
from meshwise.train.job_settings import Job

JOB = """\
plan = "dp=2"   # the two at hand

[model]
arguments = { layers = 2, heads = 2, width = 32 }

[data]
files = ["text.txt"]
context = 16

[train]
batch = 8
steps = 3
"""
FIXED = "tp=1 pp=1 zero=0"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    (tmp_path / "text.txt").write_text("plain words " * 200)
    return path


def test_it_tells_the_best_and_why_the_others_lost_and_writes_the_choice(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(job), "--on", "1x4 h100", "--fix", FIXED, "--workers", "1", "--top", "1", "--write"]
    assert main(["plan", *words]) == 0
    printed = capsys.readouterr().out
    written = tomllib.loads(job.read_text())
    assert f" {written['plan']}\n" in printed
    assert "slower: compute" in printed
    assert "# the two at hand" in job.read_text()
    assert str(from_toml(job, kind=Job).plan) == written["plan"]
    model, cluster, searched, fixed, *_ = printed.splitlines()
    assert re.fullmatch(r"model     gpt, [\d,]+ parameters, 8 samples a step", model)
    assert cluster == "cluster   1x4 h100: 1 node of 4 ranks on H100 SXM 80GB, at most 79.2 GiB a rank"
    assert searched.startswith("searched  dp cp context cp_heads microbatches ")
    assert fixed == "fixed     tp=1 pp=1 zero=0"


LOOKING = """\
from torch.nn import functional

def loss(logits, batch):
    words = batch[1].flatten()
    assert int(words.max()) >= 0
    return functional.cross_entropy(logits.flatten(0, 1), words, reduction="sum"), words.numel()
"""


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_loss_may_read_integers_of_the_batch(command: str, job: Path) -> None:
    searching = ["--fix", f"{FIXED} microbatches=1", "--workers", "1", "--top", "1"] if command == "plan" else []
    own = ["--plan", "dp=4"] if command == "simulate" else []
    Path(f"looking_{command}.py").write_text(LOOKING)
    assert main([command, str(job), "--on", "1x4 h100", "--loss", f"looking_{command}.py:loss", *searching, *own]) == 0


def test_the_job_is_written_before_whoever_reads_the_table_stops(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_args: object, **_options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("meshwise.cli.plan_command._print_result", closed)
    words = [
        str(job),
        "--on",
        "1x4 h100",
        "--fix",
        f"{FIXED} microbatches=1",
        "--workers",
        "1",
        "--top",
        "1",
        "--write",
    ]
    with pytest.raises(BrokenPipeError):
        plan_main(words)
    assert from_toml(job, kind=Job).plan.mesh().size == 4  # the job was for 2 ranks


def test_a_job_that_may_not_be_written_is_refused_before_the_search(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def searched(*_args: object, **_options: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("meshwise.cli.plan_command.search", searched)
    monkeypatch.setattr(os, "access", lambda place, _mode: place != job)
    assert main(["plan", str(job), "--on", "1x4 h100", "--fix", FIXED, "--write"]) == 2
    assert f"cannot write {job}: no permission to write to it" in capsys.readouterr().err
    assert job.read_text() == JOB


def test_the_best_plans_are_drawn(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, fixed = job.with_name("plans.html"), f"{FIXED} microbatches=1"
    assert main(["plan", str(job), "--on", "1x2 h100", "--fix", fixed, f"--html={page}"]) == 0
    assert f"wrote {page}\n" in capsys.readouterr().out
    assert page.read_text().count('<section class="plan"') == 1
    assert job.read_text() == JOB


def test_keys_that_are_not_searched_keep_the_values_of_the_job(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also keys that need another key, which the search chooses."""
    keys = "zero=3 hpz=2 prefetch=2 gather=int8 wire=int8 feedback=0"
    words = ["--plan", f"dp=2 {keys}", "--fix", "pp=1 tp=1 microbatches=1", "--top", "1", "--rehearsals", "2"]
    assert main(["plan", str(job), "--on", "1x2 h100", *words]) == 0
    [best] = re.findall(r"^1\?? +[\d.]+ s +.* (dp=2 .*)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert set(keys.split()) <= set(best.split())


def test_where_nothing_that_was_rehearsed_works_it_says_so() -> None:
    survey = SearchResult(limit=8.0, rehearsals=1)
    survey.note(
        Candidate(Plan.parse("dp=2 tp=4"), EstimateLevel.REHEARSED, PlanFigures(memory=2), refused="2 heads are fewer")
    )
    survey.note(Candidate(Plan.parse("dp=8"), EstimateLevel.TIMED, PlanFigures(memory=2)))
    message = "none of the 1 plans that were rehearsed works for this model: 2 heads are fewer\n.* work: --rehearsals 2"
    assert re.fullmatch(message, _closest(survey))


def test_where_nothing_fits_it_names_the_closest_and_what_is_missing(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--fix", f"{FIXED} microbatches=1 recompute=none offload=none", "--memory-limit", "1K", "--write"]
    assert main(["plan", str(job), "--on", "1x2 h100", *words]) == 2
    error = capsys.readouterr().err
    assert "no plan fits 1.0 KiB a rank. The closest, 'dp=2', needs" in error
    assert "bytes" in error
    assert job.read_text() == JOB


@pytest.mark.parametrize(
    "words, message",
    [
        (["--html=a.html"], '--on is missing: name the cluster, as in --on "64x8 h100"'),
        (["--on", "8 h1000"], "did you mean h100?"),
        (["--on", "8 h100", "--fix", "tpp=2"], "unknown plan key 'tpp'; did you mean tp?"),
        (["--on", "8 h100", "--fix", "precision=bf16"], "precision is not searched"),
        (["--on", "8 h100", "--fix", "tp=3"], "no plan for 8 ranks with tp=3"),
        (["--on", "8 h100", "--memory-limit", "much"], "--memory-limit much is no number of bytes"),
        (
            ["--on", "8 h100", "--plan", "dp=2 sync=local every=2"],
            "the search has no servers and no sync, and the plan",
        ),
        (["--on", "8 h100", "--plan", "dp=2 server=1"], "the search has no servers and no sync, and"),
        (["--on", "8 h100", "--top", "0"], "top = 0 has to be at least 1"),
    ],
)
def test_what_cannot_work_is_one_message(
    job: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(job), *words]) == 2
    assert message in capsys.readouterr().err

"""The study of batch sizes: its trials, what it reads from them, and its files."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from meshwise.cli import batch_command
from meshwise.cli.batch_command import TRIAL, BatchStudy, Trial, has_ended, read_trial, train_trials, trial_job
from meshwise.comm.api.world import World
from meshwise.testing import run
from meshwise.train.flags_and_toml import to_toml
from meshwise.train.job_settings import DataJob, Job, JobError, ModelJob, OptimizerJob, ScheduleJob, TrainJob

TOML = """
plan = "microbatches=2"
[model]
arguments = {{layers = 1, width = 16, heads = 2}}
[data]
files = ["{text}"]
cache = "{cache}"
context = 8
validation = 0.0
"""


def falling(batch: int, *, lr: float = 0.1, steps: int) -> Trial:
    """A trial whose loss falls from 2 by 1 / steps in each step, so that it reaches 1 after `steps`."""
    return Trial(batch, lr, tuple(2 - step / steps for step in range(1, 2 * steps)), math.nan)


def test_the_fit_finds_the_critical_batch_that_made_the_trials() -> None:
    least, samples = 100, 6400
    study = BatchStudy(tuple(falling(batch, steps=least + samples // batch) for batch in (8, 16, 32, 64, 128)), 1.0)

    assert [one.steps_to(1.0) for one in study.best] == [900, 500, 300, 200, 150]
    assert study.fit == pytest.approx((least, samples))
    assert study.critical == pytest.approx(64)


def test_the_best_rate_reaches_the_loss_first() -> None:
    slow, fast, diverged = falling(8, lr=0.1, steps=90), falling(8, lr=0.2, steps=50), Trial(8, 1.0, (math.inf,), 5.0)
    study = BatchStudy((slow, diverged, fast, falling(16, steps=40)), 1.0)

    assert study.best == (fast, falling(16, steps=40))
    assert [row[:5] for row in study.rows()[1:]] == [
        ("8", "0.1", "", "90", "720"),
        ("8", "0.2", "best", "50", "400"),
        ("8", "1", "", "", ""),
        ("16", "0.1", "best", "40", "640"),
    ]


def test_the_default_loss_is_one_that_every_batch_reaches() -> None:
    one, other = Trial(8, 0.1, (3.0, 1.0), math.nan), Trial(16, 0.1, (3.0, 2.0), math.nan)
    assert BatchStudy((one, other, Trial(32, 0.1, (math.inf,), math.nan))).loss == 2.0
    assert BatchStudy((Trial(32, 0.1, (math.inf,), math.nan),)).loss == math.inf


def test_steps_that_halve_with_the_batch_have_no_critical_batch() -> None:
    study = BatchStudy((falling(8, steps=40), falling(16, steps=20), falling(32, steps=10)), 1.0)
    assert study.fit == pytest.approx((0, 320), abs=1e-6)
    assert study.critical > 1e6
    assert math.isnan(BatchStudy((falling(8, steps=40),), 1.0).critical)


def test_a_trial_is_read_when_it_has_ended(tmp_path: Path) -> None:
    job = trial_job(Job(), batch=8, lr=0.02, samples=320, folder=str(tmp_path))
    folder = Path(job.train.output)
    folder.mkdir()
    events = [{"event": "start"}, *({"event": "step", "loss": 40.0 - step} for step in range(40))]
    events += [{"event": "noise", "critical": 12.5}]

    def written(*more: dict[str, object]) -> Trial:
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*events, *more])))
        return read_trial(job)

    assert not has_ended(job)
    (folder / TRIAL).write_text(to_toml(job))
    assert has_ended(job)
    assert not has_ended(trial_job(Job(loss="mse"), batch=8, lr=0.02, samples=320, folder=str(tmp_path)))
    ended, failed = written({"event": "end"}), written({"event": "nonfinite"})
    assert (ended.batch, ended.lr, ended.critical) == (8, 0.02, 12.5)
    assert ended.losses == (math.inf, *(39.5 - step for step in range(39)))
    assert failed.losses == (math.inf,) * 40


def test_a_trial_has_a_constant_rate_and_its_own_folder() -> None:
    job = Job(optimizer=OptimizerJob(lr=1.0), schedule=ScheduleJob("cosine", warmup=7), train=TrainJob(save_every=5))
    trial = trial_job(job, batch=16, lr=0.5, samples=1600, folder="study")

    assert (trial.train.steps, trial.train.batch, trial.train.save_every, trial.train.noise) == (100, 16, 0, False)
    assert (trial.schedule.shape, trial.schedule.warmup, trial.schedule.warmup_samples) == ("constant", 0, 160)
    assert (trial.optimizer.lr, trial.train.output) == (0.5, "study/batch-16-lr-0.5")


def test_trials_stop_after_their_time_and_go_on_later(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    data = DataJob(files=(str(tmp_path / "text.txt"),), context=8, validation=0.0, cache=str(tmp_path / "cache"))
    base = Job(ModelJob("gpt", {"layers": 1, "width": 16, "heads": 2}), data)
    sizes = ((4, 0.01), (8, 0.01), (8, 1e30))
    jobs = [trial_job(base, batch=batch, lr=lr, samples=32, folder=str(tmp_path)) for batch, lr in sizes]

    def main(world: World, seconds: float) -> int:
        return train_trials(world, jobs=jobs, seconds=seconds)

    assert run(2, main, args=(0.0,)) == [3, 3]
    assert run(2, main, args=(60.0,)) == [0, 0]
    assert [len(read_trial(job).losses) for job in jobs[:2]] == [8, 4]
    assert all(map(has_ended, jobs))
    assert run(2, main, args=(0.0,)) == [0, 0]


def test_the_command_writes_a_page_a_picture_and_a_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    output = tmp_path / "study"
    (tmp_path / "job.toml").write_text(TOML.format(text=tmp_path / "text.txt", cache=tmp_path / "cache"), "utf-8")
    words = [
        str(tmp_path / "job.toml"),
        "--folder",
        str(output),
        "--batches",
        "2",
        "4",
        "--factors",
        "1",
        "--samples",
        "80",
        "--ranks",
        "1",
    ]

    assert batch_command.main(words) == 0

    with (output / "study.csv").open(newline="") as file:
        titles, *rows = csv.reader(file)
    assert titles == ["batch", "lr", "best", "steps", "samples", "final loss", "noise scale"]
    assert [row[:2] for row in rows] == [["2", "0.001"], ["4", "0.001"]]
    assert (output / "study.png").read_bytes().startswith(b"\x89PNG")
    page = (output / "study.html").read_text("utf-8")
    assert page.count("<tr>") == 3
    assert "data:image/png;base64," in page
    assert "1/2  batch 2, lr 0.001" in capfd.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--samples", "100"], "samples = 100 are fewer than 20 steps of the largest batch; use 2560"),
        (["--batches", "0"], r"batches = \(0,\) and factors = .* need numbers above 0"),
    ],
)
def test_a_wrong_study_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(JobError, match=message):
        batch_command.main(words)

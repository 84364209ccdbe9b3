"""Where events go: lines, a live terminal, JSON, TensorBoard."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from meshwise.train.console_output import ProgressLines
from meshwise.train.job_settings import Job
from meshwise.train.run_events import (
    End,
    JsonLines,
    NonFinite,
    RunEvent,
    Sample,
    Start,
    Step,
    Validation,
    logger_maker,
)


def step(number: int, *, skipped: bool = False) -> Step:
    return Step(
        step=number,
        steps=4,
        loss=2.5 / number,
        grad_norm=1.25,
        lr=3e-4,
        tokens=4096,
        rate=12_345.0,
        memory=3 * 2**20,
        eta=75.0,
        skipped=skipped,
        samples=1,
    )


RUN: list[RunEvent] = [
    Start(
        "dp=2 zero=1",
        "dp | 0 1\nrank | 0 1",
        "",
        "CPU",
        1234,
        34,
        "12 MB",
        4,
        1,
        {"parameters": 2048, "optimizer": 0},
        {"parameters": "bfloat16", "compute": "bfloat16", "master": "float32", "buffers": "none"},
        "runs/a",
    ),
    step(1),
    step(2, skipped=True),
    NonFinite(2, "the loss is nan; rank 1: head.weight"),
    step(3),
    Validation(3, 1.5, 512),
    step(4),
    Sample(4, "def ", "f(x):\n    return [bold]x[/bold]"),
    End(
        4, 65.2, 0.625, {"job": "runs/a/job.toml", "metrics": "runs/a/metrics.jsonl"}, "meshwise verify runs/a/job.toml"
    ),
]

PLAIN = """\
plan     dp=2 zero=1   (on CPU)
         dp | 0 1
         rank | 0 1
model    1,234 parameters, 34 of them trained; on rank 0: parameters 2.0 KiB
dtypes   bfloat16: parameters, compute; float32: master
data     12 MB
run      4 steps of 1 sample, into runs/a
step 1/4  loss 2.5000  grad 1.250  lr 3.00e-04  12.3k tok/s  3.0 MiB  ETA 1:15
step 2/4  loss 1.2500  grad 1.250  lr 3.00e-04  12.3k tok/s  3.0 MiB  ETA 1:15  SKIPPED
NOT FINITE at step 2: the loss is nan; rank 1: head.weight
validation after step 3: loss 1.5000 over 512 tokens
step 4/4  loss 0.6250  grad 1.250  lr 3.00e-04  12.3k tok/s  3.0 MiB  ETA 1:15
the model writes:
  | def f(x):
  |     return [bold]x[/bold]
done: 4 steps in 1:05, loss 0.6250
  job          runs/a/job.toml
  metrics      runs/a/metrics.jsonl
next: meshwise verify runs/a/job.toml
"""


def test_away_from_a_terminal_every_event_is_a_plain_line() -> None:
    out = io.StringIO()
    sink = ProgressLines(Console(file=out, width=40), every=2)
    for event in RUN:
        sink.write(event)
    sink.close()

    assert out.getvalue() == PLAIN


@pytest.mark.parametrize("live", [False, True])
def test_what_the_loss_counts_once_a_sample_is_told_as_samples(live: bool) -> None:
    out = io.StringIO()
    sink = ProgressLines(Console(file=out, width=140, force_terminal=live, color_system=None), every=1)
    for event in (replace(step(4), tokens=16, samples=16), Validation(4, 1.5, 13)):
        sink.write(event)
    sink.close()
    assert "12.3k samples/s" in out.getvalue()
    assert "validation after step 4: loss 1.5000 over 13 samples\n" in out.getvalue()
    assert "tok" not in out.getvalue()


def test_the_pace_that_is_shown_is_that_of_the_last_twenty_steps() -> None:
    out = io.StringIO()
    sink = ProgressLines(Console(file=out, width=40), every=1)
    for number, rate in enumerate([1.0, 400.0, *[100.0] * 20], start=1):
        sink.write(replace(step(number), rate=rate, tokens=100))

    shown = [line.split()[8] for line in out.getvalue().splitlines()]
    assert shown[:3] == ["1", "2", "2.96"], "100 tokens in 100 s, 200 in 100.25 s, 300 in 101.25 s"
    assert shown[-1] == "100"


def test_on_a_terminal_the_steps_are_one_line_that_is_redrawn() -> None:
    out = io.StringIO()
    sink = ProgressLines(Console(file=out, width=140, force_terminal=True, color_system=None), every=2)
    for event in RUN:
        sink.write(event)
    sink.close()

    shown = out.getvalue()
    assert "step 4/4" in shown
    assert "loss 0.6250  grad 1.250  lr 3.00e-04  12.3k tok/s  3.0 MiB  ETA 1:15" in shown
    assert "NOT FINITE at step 2: the loss is nan; rank 1: head.weight" in shown
    assert "return [bold]x[/bold]" in shown
    assert "next: meshwise verify runs/a/job.toml" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0, "the cursor is shown again"


@pytest.mark.parametrize("live", [False, True])
def test_what_a_model_writes_does_not_steer_the_terminal(live: bool) -> None:
    out = io.StringIO()
    ProgressLines(Console(file=out, force_terminal=live, color_system=None), every=1).write(
        Sample(1, "", "a\x1b[2Jb\r\x07c")
    )

    assert "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}c" in out.getvalue()


def test_every_event_is_a_line_of_json_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    for number, event in enumerate(RUN, start=1):
        sink.write(event)
        assert len(path.read_text().splitlines()) == number, "what was written survives a kill"
    sink.close()

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"event": type(event).__name__.lower(), **asdict(event)} for event in RUN]
    assert [line["event"] for line in lines] == (
        ["start", "step", "step", "nonfinite", "step", "validation", "step", "sample", "end"]
    )


def test_json_says_what_is_not_finite_in_words(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(Validation(1, float("nan"), 0))
    sink.close()

    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)["loss"] == "nan"


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra `tensorboard` is not installed"
    )
    sink = logger_maker("tensorboard")(tmp_path, Job())
    for event in RUN:
        sink.write(event)
    sink.close()

    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(point.step, point.value) for point in read.Scalars("train/grad_norm")] == [(n, 1.25) for n in (1, 2, 3, 4)]
    assert [(point.step, point.value) for point in read.Scalars("validation/loss")] == [(3, 1.5)]

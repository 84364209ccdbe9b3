"""A whole run of a small job: the same numbers under every plan, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from meshwise.engine.step_result import NonFiniteError
from meshwise.plan import Plan
from meshwise.reference import GPT, GPTConfig
from meshwise.train.batch_and_lr import lr_schedule
from meshwise.train.data_loading import SampleOrder
from meshwise.train.flags_and_toml import from_toml
from meshwise.train.job_settings import DataJob, Job, JobError, ModelJob, OptimizerJob, SampleJob, ScheduleJob, TrainJob
from meshwise.train.loop import RunSummary
from run_job import run_job

SHAPE = {"layers": 1, "width": 16, "heads": 2, "tied": True}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A run of a few seconds over a short text."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return Job(
        model=ModelJob("gpt", SHAPE),
        data=DataJob(files=(str(text),), context=16, validation=0.2, cache=str(tmp_path / "cache")),
        optimizer=OptimizerJob(lr=1e-2),
        schedule=ScheduleJob("linear", warmup=2, floor=0.0),
        train=TrainJob(steps=6, batch=5, clip_norm=1.0, dtype="float64", output=str(tmp_path / "run")),
        sample=SampleJob(length=4),
        plan=Plan(dp=None),
    )


def change(job: Job, section: str, **changes: Any) -> Job:
    return dataclasses.replace(job, **{section: dataclasses.replace(getattr(job, section), **changes)})


def events(summary: RunSummary, kind: str) -> list[Mapping[str, Any]]:
    assert summary.folder is not None
    lines = (Path(summary.folder) / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def parameters(summary: RunSummary) -> dict[str, Tensor]:
    assert summary.folder is not None
    with safe_open(f"{summary.folder}/parameters.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


@pytest.mark.parametrize(
    "plan, ranks", [("dp=2", 2), ("dp=3 zero=1", 3), ("dp=2 zero=2 microbatches=2", 2), ("dp=3 zero=3", 3)]
)
def test_every_plan_is_the_same_run(plan: str, ranks: int, job: Job) -> None:
    alone, _ = run_job(dataclasses.replace(job, plan=Plan(dp=1)), ranks=1)
    split, _ = run_job(dataclasses.replace(job, plan=Plan.parse(plan)), ranks=ranks)

    numbers = ("loss", "grad_norm", "lr", "tokens")
    for one, other in zip(events(alone, "step"), events(split, "step"), strict=True):
        assert [other[key] for key in numbers] == pytest.approx([one[key] for key in numbers], rel=1e-9)
    assert split.validation == pytest.approx(alone.validation, rel=1e-9)
    assert [event["text"] for event in events(split, "sample")] == [event["text"] for event in events(alone, "sample")]
    for name, value in parameters(alone).items():
        torch.testing.assert_close(parameters(split)[name], value, rtol=1e-9, atol=1e-12)


def test_a_job_s_tensor_rules_reach_the_model(job: Job) -> None:
    job = dataclasses.replace(job, plan=Plan(tp=2))
    with pytest.raises(ValueError, match=re.escape("'blocks.*.mlp.nowhere' matches no module")):
        run_job(change(job, "model", tensor_rules={"blocks.*.mlp.nowhere": "colwise"}))


def test_a_run_leaves_its_job_its_metrics_and_its_parameters(job: Job) -> None:
    summary, printed = run_job(job)

    assert summary.folder is not None
    folder = Path(summary.folder)
    assert {path.name for path in folder.iterdir()} == {"job.toml", "metrics.jsonl", "parameters.safetensors"}
    assert [event["step"] for event in events(summary, "step")] == [1, 2, 3, 4, 5, 6]
    assert [event["tokens"] for event in events(summary, "step")] == [5 * 16] * 6
    assert [event["lr"] for event in events(summary, "step")] == pytest.approx(
        [0.005, 0.01, 0.01, 0.02 / 3, 0.01 / 3, 0]
    )
    assert "plan     dp=2" in printed
    assert "validation after step 6" in printed
    assert f"next: meshwise verify {shlex.quote(f'{folder}/job.toml')}" in printed

    model = GPT(GPTConfig(context=16, **SHAPE)).double()  # type: ignore[arg-type]
    missing = model.load_state_dict(parameters(summary), strict=False)
    assert missing == (["head.weight"], []), "the head is tied to the embedding, and written once"


def test_the_written_job_runs_again_to_the_same_numbers(job: Job, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    relative = change(change(job, "data", files=("text.txt",), cache="cache"), "train", output="run")
    first, _ = run_job(relative)
    monkeypatch.chdir("/")
    second, _ = run_job(from_toml(Path(str(first.folder)) / "job.toml", kind=Job))

    assert second.folder == f"{tmp_path}/run-2", "a folder that is there is left alone"
    assert events(second, "step")[-1]["loss"] == events(first, "step")[-1]["loss"]


def test_the_loss_falls(job: Job) -> None:
    job = change(change(job, "train", steps=40, batch=16, validate_every=10), "optimizer", lr=3e-2)

    summary, _ = run_job(job, ranks=1)

    losses = [event["loss"] for event in events(summary, "validation")]
    assert [event["step"] for event in events(summary, "validation")] == [10, 20, 30, 40]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 2.5 < math.log(256) < 1.1 * events(summary, "step")[0]["loss"]


def test_validation_is_exact_when_batches_do_not_divide(job: Job) -> None:
    tokens = {
        (batch, ranks): events(run_job(change(job, "train", batch=batch, steps=1), ranks=ranks)[0], "validation")[0][
            "tokens"
        ]
        for batch, ranks in [(5, 1), (5, 2), (7, 3)]
    }

    windows = (int(1801 * 0.2) - 1) // 16
    assert set(tokens.values()) == {windows * 16}, "every sample once, none twice"


OWN = """
import math
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model():
    return nn.Linear(1, 1)

def data(bad, value=math.nan):
    x = torch.arange(48.0).unsqueeze(1)
    x[bad] = value
    return TensorDataset(x, 2 * x)
"""


def of_numbers(folder: Path, job: Job, *, policy: str) -> Job:
    """A job of 6 batches of 8 samples, one of which in the third batch is not finite."""
    path = folder / f"{folder.name}.py"
    path.write_text(OWN)
    bad = SampleOrder(48, seed=0).indices(20, stop=21)
    return dataclasses.replace(
        job,
        model=ModelJob(f"{path}:model"),
        data=DataJob(dataset=f"{path}:data", arguments={"bad": bad}, validation=0.0),
        loss="mse",
        train=dataclasses.replace(job.train, batch=8, nonfinite=policy),
        sample=SampleJob(),
    )


def test_a_skipped_step_is_said_loudly_and_does_not_move_the_learning_rate(job: Job, tmp_path: Path) -> None:
    summary, printed = run_job(of_numbers(tmp_path, job, policy="skip:1"))

    steps = events(summary, "step")
    assert [event["skipped"] for event in steps] == [False, False, True, False, False, False]
    assert steps[2]["lr"] == steps[3]["lr"] > steps[4]["lr"]
    assert "NOT FINITE at step 3" in printed
    problem = events(summary, "nonfinite")[0]["problem"]
    assert "rank 1: " in problem, "number 20 is the fifth row of its batch, and ranks 0 and 1 have four each"
    assert "weight" in problem


def test_replicas_have_one_learning_rate_although_the_first_skips_alone(job: Job, tmp_path: Path) -> None:
    spoilt = of_numbers(tmp_path, job, policy="skip:1")
    first = change(spoilt, "data", arguments={"bad": SampleOrder(48, seed=0).indices(16, stop=17)})
    summary, _ = run_job(dataclasses.replace(first, plan=Plan.parse("dp=2 sync=slowmo every=2")))

    steps, rates = events(summary, "step"), lr_schedule(job.schedule, steps=6)
    assert [event["skipped"] for event in steps] == [False, False, True, False, False, False]
    assert [event["lr"] for event in steps] == [1e-2 * rates(number) for number in range(6)]


def test_an_overflow_of_fp16_on_one_rank_does_not_move_the_learning_rate(job: Job, tmp_path: Path) -> None:
    """The first scale is found by overflows, too, before the one that is planted in the third batch."""
    spoilt = of_numbers(tmp_path, job, policy="raise")
    planted = change(spoilt, "data", arguments={**spoilt.data.arguments, "value": 3e4})
    half = dataclasses.replace(planted, plan=Plan.parse("dp=2 precision=fp16"))
    summary, printed = run_job(change(half, "train", dtype=None, steps=12))

    steps = events(summary, "step")
    skipped = [event["skipped"] for event in steps]
    assert skipped[2]
    assert sum(not one for one in skipped) >= 4
    assert printed.count("the gradient overflowed at a loss scale of") == sum(skipped)
    rates = lr_schedule(job.schedule, steps=12)
    updates = [sum(not one for one in skipped[:number]) for number in range(12)]
    assert [event["lr"] for event in steps] == [1e-2 * rates(number) for number in updates]


def test_by_default_a_gradient_that_is_not_finite_ends_the_run(job: Job, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"rank 1: .*weight"):
        run_job(of_numbers(tmp_path, job, policy="raise"))

    lines = (Path(job.train.output) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "step", "step", "nonfinite"]


def test_a_folder_that_cannot_be_made_is_refused(job: Job) -> None:
    with pytest.raises(JobError, match=r"train\.output = '/dev/null/run': .*/dev/null"):
        run_job(change(job, "train", output="/dev/null/run"))


LARGE = """
import subprocess, sys
ballast = b"1" * (1 << 30)
script = "import torch; from meshwise.train.loop import _peak_memory; print(_peak_memory(torch.device('cpu')))"
subprocess.run([sys.executable, "-c", script], check=True)
"""


def test_a_link_of_an_axis_that_the_plan_lacks_is_refused(job: Job) -> None:
    with pytest.raises(JobError, match=r"emulate = '1Gbit 2ms foo': no axis foo .*; its axes are pp .* outer"):
        run_job(dataclasses.replace(job, plan=Plan.parse("dp=2x2 zero=1"), emulate="1Gbit 2ms foo"), ranks=4)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_most_memory_of_a_rank_is_not_that_of_the_process_that_started_it() -> None:
    measured = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, timeout=200)
    assert 100 << 20 < int(measured.stdout) < 1 << 30

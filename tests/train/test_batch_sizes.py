"""The batch may grow with the samples or follow the noise scale; resume, rate and samples stay exact."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwise.engine.noise_scale import NoiseScale
from meshwise.plan import Plan
from meshwise.train.batch_and_lr import PATIENCE, BatchSizes, NoiseAverage, batch_factor
from meshwise.train.flags_and_toml import from_text, to_toml
from meshwise.train.job_settings import DataJob, Job, JobError, ModelJob, OptimizerJob, ScheduleJob, TrainJob
from meshwise.train.prepare_job import prepare
from run_job import run_job

SHAPE = {"layers": 1, "width": 16, "heads": 2, "tied": True, "dropout": 0.1}


def short(tmp_path: Path, *, plan: Plan | None = None, **train: Any) -> Job:
    text = tmp_path / "text.txt"
    text.write_text("".join(random.Random(0).choices("abcdefgh", k=9000)))
    return Job(
        model=ModelJob("gpt", SHAPE),
        data=DataJob(files=(str(text),), context=8, validation=0.0, cache=str(tmp_path / "cache")),
        optimizer=OptimizerJob(lr=1e-2),
        schedule=ScheduleJob("constant", warmup_samples=40, lr_scaling="sqrt", base_batch=4),
        train=TrainJob(output=str(tmp_path / "run"), save_every=4, keep_last=99, **train),
        plan=plan or Plan(dp=2, zero=1),
    )


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind of the last start."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    start = max(number for number, event in enumerate(found) if event["event"] == "start")
    return [event for event in found[start:] if event["event"] == kind]


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
    return [tuple(event[key] for key in keys) for event in events(folder, "step")]


def test_the_batch_grows_with_the_samples() -> None:
    sizes = BatchSizes(TrainJob(batch=24, ramp=(8, 8, 4000)))
    assert [sizes.at(samples, chosen=0) for samples in (0, 1999, 2000, 3999, 4000, 9999)] == [8, 8, 16, 16, 24, 24]
    assert (sizes.first, sizes.most) == (8, 24)


def test_the_batch_follows_the_noise_within_its_bounds() -> None:
    sizes, noise = BatchSizes(TrainJob(auto_batch=(8, 32))), NoiseAverage()
    size, seen = 8, []
    for step in range(6 * PATIENCE):
        noise.add(NoiseScale(trace=100.0 if step < 3 * PATIENCE else 1.0, square=1.0))
        size = sizes.next_size(sizes.at(0, chosen=size), noise=noise)
        seen.append(size)
    assert [seen[step * PATIENCE - 1] for step in range(1, 7)] == [16, 32, 32, 32, 16, 8]


def test_a_gradient_below_its_noise_asks_for_the_largest_batch() -> None:
    noise = NoiseAverage()
    noise.add(NoiseScale(trace=1.0, square=-1.0))
    assert noise.critical() == float("inf")


@pytest.mark.parametrize(
    "schedule, samples, size, factor",
    [
        (ScheduleJob(), 0, 64, 1.0),
        (ScheduleJob(lr_scaling="linear", base_batch=32), 0, 128, 4.0),
        (ScheduleJob(lr_scaling="sqrt", base_batch=32), 0, 128, 2.0),
        (ScheduleJob(warmup_samples=100), 0, 10, 0.1),
        (ScheduleJob(warmup_samples=100), 85, 10, 0.95),
        (ScheduleJob(warmup_samples=100), 95, 10, 1.0),
    ],
)
def test_the_rate_follows_batch_and_samples(schedule: ScheduleJob, samples: int, size: int, factor: float) -> None:
    assert batch_factor(schedule, samples=samples, size=size) == pytest.approx(factor)


@pytest.mark.parametrize(
    "train, sizes, kept",
    [
        ({"steps": 10, "batch": 8, "ramp": (4, 2, 24)}, [4, 4, 4, 6, 6, 8, 8, 8, 8, 8], 4),
        ({"steps": 60, "auto_batch": (2, 4)}, None, 48),
    ],
    ids=["ramp", "auto"],
)
def test_a_resumed_run_reads_the_same_batches(
    train: dict[str, Any], sizes: list[int] | None, kept: int, tmp_path: Path
) -> None:
    job = short(tmp_path, **train)
    run_job(job)
    whole = numbers(Path(job.train.output))
    found = [samples for *_, samples in whole]
    assert found == sizes or (sizes is None and found[kept] == 2 and found[-1] == 4)
    killed = tmp_path / "killed"
    shutil.copytree(job.train.output, killed)
    for path in (killed / "checkpoints").glob("step-*"):
        if int(path.name.partition("-")[2]) > kept:
            shutil.rmtree(path)

    run_job(dataclasses.replace(job, train=dataclasses.replace(job.train, output=str(killed), resume="auto")))

    assert numbers(killed) == whole[kept:]


def test_the_noise_is_reported(tmp_path: Path) -> None:
    job = short(tmp_path, steps=6, batch=8, noise=True, log_every=3)
    _, printed = run_job(job)
    [first, last] = events(Path(job.train.output), "noise")
    assert (first["step"], last["step"]) == (3, 6)
    assert last["layers"].keys() == {"embedding", "positions", "blocks.0", "norm"}
    assert last["critical"] == pytest.approx(last["trace"] / last["square"])
    assert "noise    after step 6: the critical batch is about" in printed


@pytest.mark.parametrize(
    "train, plan, message",
    [
        ({"batch": 8, "ramp": (3, 2, 100)}, Plan(), r"train.ramp = \[3, 2, 100\] does not lead to train.batch = 8; wr"),
        ({"auto_batch": (16, 8)}, Plan(), r"train.auto_batch = \[16, 8\] has to be a lower and an upper bound"),
        (
            {"noise": True, "batch": 8},
            Plan(),
            r"noise needs two micro-batches in a step, and .dp=1. has one; use microb",
        ),
        (
            {"noise": True, "batch": 9},
            Plan(microbatches=2),
            "train.batch = 9 is no multiple of the 2 micro",
        ),
        ({"auto_batch": (2, 8)}, Plan(microbatches=3), "train.auto_batch = 2 samples, 2 for a replica"),
        ({"auto_batch": (2, 10**6)}, Plan(microbatches=2), "train.auto_batch = 1,000,000 samples, but .* use 1"),
    ],
)
def test_a_wrong_batch_is_refused(train: dict[str, Any], plan: Plan, message: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=message):
        prepare(short(tmp_path, plan=plan, **train), ranks=1)


def test_warm_up_is_given_once() -> None:
    with pytest.raises(JobError, match=r"schedule.warmup = 1 and schedule.warmup_samples are given; leave out one"):
        ScheduleJob(warmup=1, warmup_samples=1)


def test_a_job_of_several_optimizers_trains_and_resumes(tmp_path: Path) -> None:
    job = dataclasses.replace(
        short(tmp_path, steps=8, batch=6),
        optimizer=OptimizerJob(
            "Muon",
            lr=0.02,
            rest={"name": "AdamW", "lr": 3e-3},
            groups={"*norm.weight": {"lr": 1e-4}, "blocks.*.projection.weight": {"optimizer": "rest"}},
            layer_decay=0.5,
        ),
    )
    assert from_text(to_toml(job), source="again", kind=Job) == job
    run_job(job)
    killed = tmp_path / "killed"
    shutil.copytree(job.train.output, killed)
    shutil.rmtree(killed / "checkpoints" / "step-00000008", ignore_errors=True)
    for path in sorted((killed / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(path)
    run_job(dataclasses.replace(job, train=dataclasses.replace(job.train, output=str(killed), resume="auto")))

    assert numbers(killed) == numbers(Path(job.train.output))[4:]


@pytest.mark.parametrize(
    "optimizer, message",
    [
        (OptimizerJob(groups={"blcks.*": {"lr": 1.0}}), r"optimizer.groups: no parameter matches the pattern 'blcks"),
        (OptimizerJob(groups={"*": {"lrr": 1.0}}), r"optimizer.groups: '\*': unknown option 'lrr'; did you mean 'lr'"),
        (
            OptimizerJob(groups={"*": {"optimizer": "rest"}}),
            r"optimizer = 'rest' is unknown\. .* write rest = \{name",
        ),
        (OptimizerJob("Muon", rest={"name": "Adan"}), r"optimizer.rest.name = 'Adan' is no class of torch.optim"),
        (OptimizerJob("Muon", arguments={"spped": 1}), r"Muon takes no spped; it takes lr"),
        (OptimizerJob("Muon"), r'"Muon" updates matrices only; add rest = \{name = "AdamW", lr = 3e-4\}'),
    ],
)
def test_wrong_options_are_refused(optimizer: OptimizerJob, message: str, tmp_path: Path) -> None:
    job = dataclasses.replace(short(tmp_path, steps=1, batch=4), optimizer=optimizer)
    with pytest.raises(JobError, match=message):
        prepare(job, ranks=2)


def test_a_group_is_a_table() -> None:
    with pytest.raises(JobError, match=r"optimizer.groups: 'a' = 1 is no table; write \{lr = 0.001\}"):
        OptimizerJob(groups={"a": 1})

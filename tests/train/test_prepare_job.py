"""A job made ready: its plan resolved, its paths absolute, refused while nothing has been started."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwise.plan import Plan, PlanError
from meshwise.train.data_loading import STDLIB
from meshwise.train.job_settings import DataJob, Job, JobError, ModelJob, OptimizerJob, SampleJob, ScheduleJob, TrainJob
from meshwise.train.prepare_job import prepare

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model():
    return nn.Linear(1, 1)

def data():
    return TensorDataset(torch.ones(9, 1), torch.ones(9, 1))

def loss(output, batch):
    return output.sum(), output.numel()

class Own(torch.optim.SGD):
    pass

class Steps(torch.optim.lr_scheduler.ExponentialLR):
    pass
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of the user's own functions in a file named relative to where it is run."""
    monkeypatch.chdir(tmp_path)
    name = f"{tmp_path.name}.py"
    (tmp_path / name).write_text(OWN)
    return Job(
        model=ModelJob(f"{name}:model"),
        data=DataJob(files=("text.txt", STDLIB, "more/*.txt"), dataset=f"{name}:data", cache="cache"),
        loss=f"{name}:loss",
        optimizer=OptimizerJob(f"whole:{name}:Own"),
        schedule=ScheduleJob(name=f"{name}:Steps", arguments={"gamma": 0.9}),
        train=TrainJob(batch=3, output="runs/own"),
        plan=Plan(dp=None, zero=1),
        ranks=3,
    )


def test_what_is_prepared_can_be_run_again_from_anywhere(job: Job, tmp_path: Path) -> None:
    prepared = prepare(job, ranks=3).job

    assert (str(prepared.plan), prepared.ranks) == ("dp=3 zero=1", None)
    assert prepared.data.files == (f"{tmp_path}/text.txt", STDLIB, f"{tmp_path}/more/*.txt")
    assert prepared.data.cache == f"{tmp_path}/cache"
    assert prepared.train.output == f"{tmp_path}/runs/own"
    names = [prepared.model.name, prepared.data.dataset, prepared.loss]
    assert names == [f"{tmp_path}/{tmp_path.name}.py:{what}" for what in ("model", "data", "loss")]
    assert prepared.optimizer.name == f"whole:{tmp_path}/{tmp_path.name}.py:Own"
    assert prepared.schedule.name == f"{tmp_path}/{tmp_path.name}.py:Steps"
    assert prepare(prepared, ranks=3).job == prepared


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train": TrainJob(batch=2)}, "train.batch = 2 samples cannot be shared by the 3 replicas of 'dp=3 zero=1'"),
        ({"sample": SampleJob(length=1)}, "sample.length = 1: only a model of text"),
        ({"loss": "none.py:loss"}, "loss = 'none.py:loss': there is no file none.py"),
    ],
)
def test_a_job_that_cannot_work_is_refused(changes: dict[str, Any], message: str, job: Job) -> None:
    with pytest.raises(JobError, match=message):
        prepare(dataclasses.replace(job, **changes), ranks=3)


def test_tensorboard_that_is_not_installed_names_the_extra(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    with pytest.raises(JobError, match=r"pip install 'meshwise\[tensorboard\]'"):
        prepare(dataclasses.replace(job, train=TrainJob(batch=3, loggers=("tensorboard",))), ranks=1)


def test_a_plan_for_other_ranks_is_refused(job: Job) -> None:
    with pytest.raises(PlanError, match="needs 2 ranks, but the world has 3"):
        prepare(dataclasses.replace(job, plan=Plan(dp=2)), ranks=3)

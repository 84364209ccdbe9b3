"""A run that goes on from a checkpoint is the run that never stopped: the same samples, the same numbers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from grid import Grid
from meshwise.checkpoint.checkpoint_format import DamageError, SaveError, read_index
from meshwise.comm.api.launcher_info import JobAttempt
from meshwise.plan import Plan
from meshwise.train.data_loading import SampleOrder
from meshwise.train.job_settings import DataJob, Job, JobError, ModelJob, OptimizerJob, ScheduleJob, SwapJob, TrainJob
from meshwise.train.run_checkpoints import LAUNCH, find_run_start
from run_job import run_job

STEPS = 8
SHAPE = {"layers": 1, "width": 16, "heads": 2, "tied": True, "dropout": 0.1}
OWN = """
import math
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data(bad):
    x = torch.arange(64.0).unsqueeze(1) / 64
    x[bad] = math.nan
    return TensorDataset(x, 2 * x)

def model():
    return nn.Linear(1, 1)
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return short(tmp_path)


def short(tmp_path: Path) -> Job:
    """A run of a second over a short text, with a checkpoint after every step."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return Job(
        model=ModelJob("gpt", SHAPE),
        data=DataJob(files=(str(text),), context=16, validation=0.0, cache=str(tmp_path / "cache")),
        optimizer=OptimizerJob(lr=1e-2),
        schedule=ScheduleJob("cosine", warmup=2),
        train=TrainJob(
            steps=STEPS, batch=5, clip_norm=1.0, save_every=1, keep_last=STEPS, output=str(tmp_path / "run")
        ),
        plan=Plan(dp=2, zero=1),
    )


def change(job: Job, section: str, **changes: Any) -> Job:
    return dataclasses.replace(job, **{section: dataclasses.replace(getattr(job, section), **changes)})


def lines(folder: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path, kind: str) -> list[Mapping[str, Any]]:
    return [event for event in lines(folder) if event["event"] == kind]


NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "skipped")


def steps(folder: Path) -> list[tuple[Any, ...]]:
    """The numbers of the steps of the last start."""
    last = lines(folder)
    start = max(number for number, event in enumerate(last) if event["event"] == "start")
    return [tuple(event[key] for key in NUMBERS) for event in last[start:] if event["event"] == "step"]


def killed_after(step: int, folder: Path, *, into: Path) -> Path:
    """The folder of a run as a kill in the step after `step` leaves it, whose checkpoint is published."""
    shutil.copytree(folder, into)
    for path in (into / "checkpoints").glob("step-*"):
        if int(path.name.partition("-")[2]) > step:
            shutil.rmtree(path)
    (into / "parameters.safetensors").unlink()
    return into


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that never stopped."""
    torch.manual_seed(0)
    job = short(tmp_path_factory.mktemp("whole"))
    run_job(job)
    return Path(job.train.output)


@pytest.mark.parametrize("step", [1, 4, STEPS - 1])
def test_killed_at_any_step_and_resumed_every_later_number_is_the_same(
    step: int, whole: Path, job: Job, tmp_path: Path
) -> None:
    folder = killed_after(step, whole, into=tmp_path / "killed")

    summary, printed = run_job(change(job, "train", output=str(folder), resume="auto"))

    assert summary.folder == str(folder)
    assert steps(folder) == steps(whole)[step:], "bit for bit"
    assert [event["step"] for event in events(folder, "resume")] == [step]
    assert (folder / "parameters.safetensors").read_bytes() == (whole / "parameters.safetensors").read_bytes()
    assert f"resume   after step {step} ({5 * step} samples), from {folder}/checkpoints/step-{step}" in printed


OWN_SCHEDULER = """
from torch.optim.lr_scheduler import LRScheduler

class Halving(LRScheduler):
    def __init__(self, optimizer, every):
        self.every = every
        super().__init__(optimizer)

    def get_lr(self):
        return [rate * 0.5 ** (self.last_epoch // self.every) for rate in self.base_lrs]
"""
SCHEDULERS: Mapping[str, tuple[dict[str, Any], list[float]]] = {
    "OneCycleLR": ({"max_lr": 0.02, "total_steps": STEPS}, []),
    "MultiStepLR": ({"milestones": [2, 5], "gamma": 0.1}, [1e-2, 1e-2, 1e-3, 1e-3, 1e-3, 1e-4, 1e-4, 1e-4]),
    "halving.py:Halving": ({"every": 3}, [1e-2] * 3 + [5e-3] * 3 + [2.5e-3] * 2),
}


@pytest.mark.grid(Grid({"name": tuple(SCHEDULERS)}, heavy=lambda cell: cell["name"] == "MultiStepLR"))
def test_a_scheduler_of_the_job_goes_on_as_if_the_run_had_not_stopped(name: str, job: Job, tmp_path: Path) -> None:
    arguments, rates = SCHEDULERS[name]
    (tmp_path / "halving.py").write_text(OWN_SCHEDULER)
    name = str(tmp_path / name) if name.endswith("Halving") else name
    job = dataclasses.replace(job, schedule=ScheduleJob(name=name, arguments=arguments))
    run_job(job)
    whole = Path(job.train.output)
    folder = killed_after(3, whole, into=tmp_path / "killed")
    run_job(change(job, "train", output=str(folder), resume="auto"))

    found = [event["lr"] for event in events(whole, "step")]
    assert found == pytest.approx(rates) if rates else found[0] < found[2] > found[-1]
    assert steps(folder) == steps(whole)[3:], "bit for bit"
    assert (folder / "parameters.safetensors").read_bytes() == (whole / "parameters.safetensors").read_bytes()


def test_the_average_of_a_job_is_validated_and_goes_on(job: Job, tmp_path: Path) -> None:
    job = change(change(job, "data", validation=0.2), "train", validate_every=2, average=0.7)
    run_job(job)
    whole = Path(job.train.output)
    folder = killed_after(3, whole, into=tmp_path / "killed")
    run_job(change(job, "train", output=str(folder), resume="auto"))
    run_job(change(job, "train", average=None, output=str(tmp_path / "plain")))

    averaged, resumed, plain = (
        [event["loss"] for event in events(place, "validation")] for place in (whole, folder, tmp_path / "plain")
    )
    assert resumed[-3:] == averaged[-3:], "bit for bit"
    assert steps(whole) == steps(tmp_path / "plain")
    assert all(one > other for one, other in zip(averaged, plain, strict=True)), "it lags behind a falling loss"
    with pytest.raises(JobError, match=r"train.average: average\(1.5\): the decay is between 0 and 1"):
        run_job(change(job, "train", average=1.5))


@pytest.mark.parametrize(
    "schedule, message",
    [
        (
            {"name": "OneCycle"},
            "no function 'OneCycle' in torch.optim.lr_scheduler; did you mean 'OneC",
        ),
        ({"name": "ReduceLROnPlateau"}, "follows a measured value"),
        ({"name": "StepLR", "arguments": {"steps": 2}}, "schedule.arguments: unknown argument 'steps'; did you mean"),
        ({"name": "StepLR", "warmup": 3}, "sets the rate alone; of .schedule. leave only arguments"),
        ({"arguments": {"gamma": 2}}, 'add schedule.name = "OneCycleLR"'),
        ({"name": "OneCycleLR", "arguments": {"max_lr": 0.1, "total_steps": 3}}, "schedule.name: .* total steps is 3"),
    ],
)
def test_a_wrong_scheduler_is_refused(schedule: dict[str, Any], message: str, job: Job) -> None:
    with pytest.raises(JobError, match=message):
        run_job(dataclasses.replace(job, schedule=ScheduleJob(**schedule)))


@pytest.mark.parametrize("plan, ranks", [("dp=1", 1), ("dp=3 zero=3", 3), ("dp=2 zero=2 microbatches=2", 2)])
def test_another_plan_or_world_goes_on_with_the_same_samples(plan: str, ranks: int, job: Job, tmp_path: Path) -> None:
    job = change(job, "train", dtype="float64")
    run_job(job)
    whole = Path(job.train.output)
    folder = killed_after(3, whole, into=tmp_path / "killed")

    resumed = dataclasses.replace(change(job, "train", output=str(folder), resume="auto"), plan=Plan.parse(plan))
    run_job(resumed, ranks=ranks)

    assert [event["changes"] for event in events(folder, "resume")] == [[f"plan: 'dp=2 zero=1' -> '{plan}'"]]
    for one, other in zip(steps(whole)[3:], steps(folder), strict=True):
        assert other == pytest.approx(one, rel=1e-9)


def of_numbers(job: Job, tmp_path: Path, *, batches: list[int]) -> Job:
    """A job of numbers of which the second sample in each of these batches is not finite."""
    (tmp_path / "own_resume.py").write_text(OWN)
    bad = [SampleOrder(64, seed=0).indices(5 * batch + 1, stop=5 * batch + 2)[0] for batch in batches]
    return dataclasses.replace(
        job,
        model=ModelJob(f"{tmp_path}/own_resume.py:model"),
        data=DataJob(dataset=f"{tmp_path}/own_resume.py:data", arguments={"bad": bad}, validation=0.0),
        loss="mse",
    )


def test_skipped_steps_are_remembered(job: Job, tmp_path: Path) -> None:
    job = change(of_numbers(job, tmp_path, batches=[2, 3]), "train", nonfinite="skip:2")
    run_job(job)
    whole = Path(job.train.output)
    folder = killed_after(3, whole, into=tmp_path / "killed")

    run_job(change(job, "train", output=str(folder), resume="auto"))
    assert steps(folder)[1:] == steps(whole)[4:]
    assert [row[-1] for row in steps(folder)] == [True, False, False, False, False], "step 4 is skipped, too"

    again = killed_after(3, whole, into=tmp_path / "again")
    with pytest.raises(RuntimeError, match="nonfinite='skip:1' allows no more such steps"):
        run_job(change(job, "train", output=str(again), resume="auto", nonfinite="skip:1"))


def test_what_would_be_another_run_is_refused_with_the_keys(whole: Path, job: Job) -> None:
    other = change(change(change(job, "train", resume=str(whole), seed=1), "optimizer", lr=1.0), "data", context=8)

    with pytest.raises(JobError) as error:
        run_job(other)

    assert str(error.value).splitlines() == [
        "the job differs from the job of the checkpoint:",
        "  data.context: 16 -> 8",
        "  optimizer.lr: 0.01 -> 1.0",
        "  train.seed: 0 -> 1",
        "undo these changes, or accept them: --train.accept data.context optimizer.lr train.seed",
    ]


def test_a_change_that_is_meant_is_taken_and_said(whole: Path, job: Job) -> None:
    step_4 = str(whole / "checkpoints" / "step-4")
    accepted = change(job, "train", resume=step_4, accept=("optimizer",), output=str(whole))
    summary, printed = run_job(change(accepted, "optimizer", lr=2e-2, weight_decay=0.3))

    assert summary.folder == f"{whole}-2", "a checkpoint that is named begins a new run"
    folder = Path(str(summary.folder))
    lrs = [row[3] for row in steps(folder)]
    assert lrs == [2 * row[3] for row in steps(whole)[4:]]
    assert "changed: optimizer.lr: 0.01 -> 0.02" in printed
    assert "changed: optimizer.weight_decay: (default) -> 0.3" in printed
    assert steps(folder)[-1][1] != steps(whole)[-1][1]


def test_where_ranks_meet_and_state_rests_may_change(whole: Path, job: Job, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(job, comm="gloo", swap=SwapJob(folder=str(tmp_path), buffers=2))
    summary, printed = run_job(
        change(elsewhere, "train", resume=str(whole / "checkpoints" / "step-4"), output=str(whole))
    )
    assert "comm: " not in printed
    assert "swap." not in printed
    assert steps(Path(str(summary.folder))) == steps(whole)[4:]


def test_the_text_is_compared_by_what_it_says(whole: Path, job: Job, tmp_path: Path) -> None:
    text = Path(job.data.files[0])
    moved = tmp_path / "moved.txt"
    text.rename(moved)
    resumed = change(change(job, "data", files=(str(moved),)), "train", resume=str(whole))
    assert "changed: data.files" in run_job(resumed)[1]

    moved.write_text(moved.read_text().replace("lazy", "busy"))
    with pytest.raises(JobError, match=r"content of the data: 1801 bytes, \w+ -> 1801 bytes, \w+\n.* data"):
        run_job(resumed)


def test_a_run_that_is_over_is_over_and_more_steps_go_on_from_its_end(whole: Path, job: Job, tmp_path: Path) -> None:
    shutil.copytree(whole, folder := tmp_path / "over")
    over = change(job, "train", output=str(folder), resume="auto")

    assert run_job(over)[0].loss == steps(whole)[-1][1]
    assert steps(folder) == []

    _, printed = run_job(change(over, "train", steps=STEPS - 1))
    assert f"done: {STEPS} steps" in printed, "not those that were asked for"
    with safe_open(folder / "parameters.safetensors", "pt") as kept:
        assert kept.metadata()["steps"] == str(STEPS)

    _, printed = run_job(change(over, "train", steps=STEPS + 2))
    assert [row[0] for row in steps(folder)] == [STEPS + 1, STEPS + 2]
    assert f"changed: train.steps: {STEPS} -> {STEPS + 2}, and the learning rate follows the new length" in printed


def test_damaged_checkpoints_are_named_and_passed_over(whole: Path, job: Job, tmp_path: Path) -> None:
    folder = killed_after(5, whole, into=tmp_path / "killed")
    torn = folder / "checkpoints" / "step-5" / "rank-00001.safetensors"
    data = bytearray(torn.read_bytes())
    data[-1] ^= 1
    torn.write_bytes(data)
    (folder / "checkpoints" / "step-4" / "checkpoint.json").write_text("{}")

    _, printed = run_job(change(job, "train", output=str(folder), resume="auto"))

    assert steps(folder) == steps(whole)[3:]
    assert f"DAMAGED, skipped: {torn}" in printed
    assert "step-4/checkpoint.json" in printed

    for path in (folder / "checkpoints").glob("*/checkpoint.json"):
        path.write_text("")
    with pytest.raises(DamageError, match=r"checkpoint\.json"):
        run_job(change(job, "train", output=str(folder), resume="auto"))


def test_without_a_checkpoint_auto_begins_and_a_folder_is_refused(job: Job, tmp_path: Path) -> None:
    _, printed = run_job(change(job, "train", resume="auto", steps=1, save_every=0))
    assert "resume" not in printed
    _, printed = run_job(change(job, "train", resume="auto", steps=1, save_every=0))
    assert "no checkpoint yet: from the start" in printed
    with pytest.raises(JobError, match=r"no checkpoint there; name a run"):
        run_job(change(job, "train", resume=job.train.output))
    with pytest.raises(JobError, match=r"is no run"):
        run_job(change(job, "train", resume="auto", output=str(tmp_path)))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"")
    with pytest.raises(JobError, match=r'layout of Hugging Face.*model.name = "hf:/.*/llama"'):
        run_job(change(job, "train", resume=str(tmp_path / "llama")))


def test_the_oldest_checkpoints_go(job: Job) -> None:
    run_job(change(job, "train", save_every=3, keep_last=2))
    root = Path(job.train.output) / "checkpoints"
    assert sorted(path.name for path in root.glob("step-*")) == ["step-6", "step-8"]
    assert [event["step"] for event in events(root.parent, "saved")] == [3, 6, 8]


def test_the_checkpoint_of_the_lowest_validation_loss_is_kept_and_a_resumed_run_knows_it(job: Job) -> None:
    root = Path(job.train.output) / "checkpoints"
    rates = change(job, "data", validation=0.2)
    run_job(change(rates, "train", validate_every=1, keep_best=True, save_every=0))
    losses = {event["step"]: event["loss"] for event in events(root.parent, "validation")}
    best = min(losses, key=losses.__getitem__)
    assert [path.name for path in root.iterdir() if path.is_dir()] == ["best"]
    saved = read_index(root / "best").extra["user"]["progress"]
    assert (saved["step"], saved["best"]) == (best, losses[best])

    worse = change(change(rates, "optimizer", lr=50.0), "train", accept=("optimizer.lr",), steps=STEPS + 2)
    run_job(change(worse, "train", validate_every=1, keep_best=True, save_every=0, resume="auto"))
    assert read_index(root / "best").extra["user"]["progress"] == saved


def test_a_save_that_fails_is_said_and_the_run_goes_on(job: Job) -> None:
    output = Path(job.train.output)
    output.mkdir()
    (output / "job.toml").write_text("")
    (output / "checkpoints").write_text("in the way")
    with pytest.raises(SaveError, match="step-8 was not saved"):
        run_job(change(job, "train", resume="auto", save_every=4))
    assert [event["step"] for event in events(output, "savefailed")] == [4, 8]
    assert len(steps(output)) == STEPS
    assert (output / "parameters.safetensors").exists()


def test_an_elastic_restart_finds_the_folder_of_its_own_job(job: Job, tmp_path: Path) -> None:
    def at(run: str, number: int) -> Path | None:
        return find_run_start(job, attempt=JobAttempt(run, number, max_restarts=3)).folder

    for name, launch in (("run", "first"), ("run-2", "none"), ("run-3", "mine"), ("run-4", "none")):
        (tmp_path / name).mkdir()
        (tmp_path / name / LAUNCH).write_text(launch)
    assert at("mine", 1) == at("mine", 0) == tmp_path / "run-3"
    assert at("other", 1) is None
    assert at("none", 1) == tmp_path / "run-4", "torchrun calls jobs without a name `none`"
    assert at("none", 0) is None


def test_restarts_without_checkpoints_are_refused() -> None:
    with pytest.raises(JobError, match=r"restarts = 2 with train\.save_every = 0"):
        Job(restarts=2)


STOPPER = """
from pathlib import Path
from meshwise.train.run_events import Step

class Stopper:
    def __init__(self, folder, job):
        self.stop = Path(folder, "stop")

    def write(self, event):
        if isinstance(event, Step) and event.step == 3:
            self.stop.touch()

    def close(self):
        pass
"""


def test_a_run_that_a_file_stops_saves_and_can_be_resumed(whole: Path, job: Job, tmp_path: Path) -> None:
    (tmp_path / "stopper.py").write_text(STOPPER)
    folder = tmp_path / "stopped"
    first = change(
        job, "train", output=str(folder), save_every=100, log_every=1, loggers=(f"{tmp_path}/stopper.py:Stopper",)
    )
    _, printed = run_job(first)
    assert "stopped  after step 3, as the file `stop` asked" in printed
    assert f"next: meshwise train {folder}/job.toml --train.output {folder} --train.resume auto" in printed
    assert [event["step"] for event in events(folder, "stopped")] == [3]
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-3"]
    assert not (folder / "stop").exists()

    (folder / "stop").touch()  # of a run that ended before it looked
    _, printed = run_job(change(job, "train", output=str(folder), save_every=100, log_every=1, resume="auto"))
    assert "stopped  after" not in printed
    assert steps(folder) == steps(whole)[3:]

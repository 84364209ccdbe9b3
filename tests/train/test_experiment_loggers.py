"""Test that the loggers of a job get the run's numbers and events, and that a missing one names its extra."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwise.comm.api.world import World
from meshwise.testing import run
from meshwise.train.console_output import OutputConsole
from meshwise.train.job_settings import DataJob, Job, JobError, ModelJob, TrainJob
from meshwise.train.loop import train
from meshwise.train.run_events import End, RunEvent, Start, Step, Validation, logger_maker


class Heard:
    """A callback of a user, which writes the names of the events to a file."""

    def __init__(self, folder: Path, job: Job) -> None:
        self._file = (folder / "heard").open("w")
        self._file.write(f"{job.train.steps}\n")

    def write(self, event: RunEvent) -> None:
        kinds = (Start, Step, Validation, End)
        self._file.write(f"{type(event).__name__}\n" if isinstance(event, kinds) else "")

    def close(self) -> None:
        self._file.close()


class Full:
    """A callback of a user whose disk is full."""

    def __init__(self, folder: Path, _job: Job) -> None:
        self._file = folder / "closed"

    def write(self, event: RunEvent) -> None:
        raise RuntimeError(f"no room for {event}")

    def close(self) -> None:
        self._file.touch()


def job(folder: Path, *loggers: str) -> Job:
    (folder / "text").write_text("some text to train on, and to validate on. " * 20)
    shape = {"layers": 1, "heads": 1, "width": 8}
    settings = TrainJob(steps=2, batch=2, output=str(folder / "run"), loggers=loggers)
    data = DataJob(files=(str(folder / "text"),), context=8, validation=0.1, cache=str(folder / "cache"))
    return dataclasses.replace(Job(), model=ModelJob("gpt", arguments=shape), data=data, train=settings)


def trained(world: World, given: Job) -> None:
    train(world, job=given, console=OutputConsole(quiet=True))


def test_a_class_of_the_user_gets_every_event_on_rank_0(tmp_path: Path) -> None:
    run(2, trained, args=(job(tmp_path, f"{__file__}:Heard"),))
    assert (tmp_path / "run" / "heard").read_text().split() == ["2", "Start", "Step", "Step", "Validation", "End"]


def test_the_sinks_are_closed_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no room"):
        run(1, trained, args=(job(tmp_path, f"{__file__}:Full"),))
    assert (tmp_path / "run" / "closed").exists()


def tracker(calls: list[Any]) -> Any:
    """A stand-in for the three libraries, which notes how it is called."""

    class Run:
        def __init__(self, **given: Any) -> None:
            calls.append(("open", given))

        def log(self, numbers: Any, step: int) -> None:
            calls.append(("log", sorted(numbers), step))

        def track(self, _value: float, name: str, step: int) -> None:
            calls.append(("log", name, step))

        def __setitem__(self, key: str, _value: str) -> None:
            calls.append(("config", key))

        def finish(self) -> None:
            calls.append(("close",))

        close = finish

    return SimpleNamespace(
        Run=Run,
        init=Run,
        start_run=lambda **given: calls.append(("open", given)),
        log_text=lambda _text, name: calls.append(("config", name)),
        log_metrics=lambda numbers, step: calls.append(("log", sorted(numbers), step)),
        end_run=lambda: calls.append(("close",)),
    )


@pytest.mark.parametrize("name", ["wandb", "mlflow", "aim"])
def test_a_tracker_gets_the_numbers_of_steps_and_validations(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, name, tracker(calls))
    run(2, trained, args=(job(tmp_path, name),))
    assert calls[0][0] == "open"
    assert calls[-1] == ("close",)
    logged = [call[1:] for call in calls if call[0] == "log"]
    assert {step for _, step in logged} == {1, 2}
    names = {word for words, _ in logged for word in ([words] if isinstance(words, str) else words)}
    assert {"train/loss", "train/lr", "validation/loss"} <= names


def test_wandb_itself_takes_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run(1, trained, args=(job(tmp_path, "wandb"),))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*"))


def test_an_unknown_logger_and_a_missing_extra_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match=r"'wand' is none of tensorboard, wandb, mlflow, aim, nor a 'module:Class'"):
        logger_maker("wand")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(JobError, match=r"train.loggers needs a library: .*; pip install 'meshwise\[mlflow\]'"):
        logger_maker("mlflow")

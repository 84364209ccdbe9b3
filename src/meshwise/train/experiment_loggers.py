"""Write a run's events to metrics.jsonl, its numbers to trackers (`train.loggers`), and events to classes of the user.

    | train.loggers         what rank 0 calls
    | "tensorboard"         SummaryWriter(folder/tensorboard)       extra `tensorboard`
    | "wandb"               wandb.init, run.log, run.finish        extra `wandb`
    | "mlflow"              mlflow.start_run, log_metrics, end_run  extra `mlflow`
    | "aim"                 aim.Run(repo=folder), track, close      extra `aim`
    | "my_module:Callback"  Callback(folder, job), then callback.write(event) for every event, callback.close()

An event is a dataclass of `run_events.py`: Start, Step, Validation, Saved, End and others."""

import importlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from meshwise.train.job import Job, JobError
from meshwise.train.job_toml import to_toml
from meshwise.train.objects_by_name import locate
from meshwise.train.run_events import Event, EventSink, Step, Validation, event_record

Tracker: TypeAlias = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]
"""Functions of a tracker: log (numbers by name, step), and close."""


class TrackedNumbers:
    """An event sink that passes the numbers of steps and validations to a tracker."""

    def __init__(self, tracker: Tracker) -> None:
        self._log, self._close = tracker

    def write(self, event: Event) -> None:
        """Log the numbers of a step or a validation; ignore other events."""
        if isinstance(event, Step):
            names = ("loss", "grad_norm", "lr", "rate", "memory")
            self._log({f"train/{name}": float(getattr(event, name)) for name in names}, event.step)
        elif isinstance(event, Validation):
            self._log({"validation/loss": event.loss}, event.step)

    def close(self) -> None:
        """End the tracker's run."""
        self._close()


def logger_maker(name: str) -> Callable[[Path, Job], EventSink]:
    """Return the function that opens a logger. Raises JobError for an unknown name and for a missing extra."""
    if ":" in name:
        return locate(name, key="train.loggers")
    if name not in _TRACKERS:
        known = ", ".join(_TRACKERS)
        raise JobError(f"train.loggers: {name!r} is none of {known}, nor a 'module:Class' of your own")
    try:
        library = importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError as error:
        need = f"train.loggers = ['{name}'] needs the extra `{name}`: pip install 'meshwise[{name}]'"
        raise JobError(need) from error
    return lambda folder, job: TrackedNumbers(_TRACKERS[name](library, folder, to_toml(job)))


def _tensorboard(tensorboard: Any, folder: Path, _job: str) -> Tracker:
    writer = tensorboard.SummaryWriter(str(folder / "tensorboard"))

    def log(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(wandb: Any, folder: Path, job: str) -> Tracker:
    run = wandb.init(project="meshwise", name=folder.name, dir=str(folder), config={"job": job})
    return (lambda numbers, step: run.log(dict(numbers), step=step)), run.finish


def _mlflow(mlflow: Any, folder: Path, job: str) -> Tracker:
    mlflow.start_run(run_name=folder.name)
    mlflow.log_text(job, "job.toml")
    return (lambda numbers, step: mlflow.log_metrics(dict(numbers), step=step)), mlflow.end_run


def _aim(aim: Any, folder: Path, job: str) -> Tracker:
    run = aim.Run(repo=str(folder), experiment=folder.name)
    run["job"] = job

    def log(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            run.track(value, name=name, step=step)

    return log, run.close


_TRACKERS: Mapping[str, Callable[[Any, Path, str], Tracker]] = MappingProxyType(
    {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "aim": _aim}
)


class JsonLines:
    """An event sink that appends each event to a file as one line of JSON, and flushes the line at once.

    An infinite number or NaN is written as the string `inf`, `-inf` or `nan`. If the file exists, an unfinished last
    line is removed first; a killed run may have left it."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            whole = path.read_bytes().rpartition(b"\n")
            os.truncate(path, len(whole[0] + whole[1]))
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: Event) -> None:
        """Append the event as a line."""
        self._file.write(json.dumps({key: _plain(value) for key, value in event_record(event).items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

"""Define the events of a training run (a step, a validation, a checkpoint …), and pass them to files and trackers.

The training loop passes each event to sinks. They print the events (`console_output`), write them to metrics.jsonl
(`JsonLines`), and pass them to the loggers of docs/checkpoints.md (`logger_maker`). Only rank 0 has sinks."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshwise.train.flags_and_toml import to_toml
from meshwise.train.job_settings import Job, JobError
from meshwise.train.objects_by_name import locate
from meshwise.train.pretrained_model import import_library


@dataclass(frozen=True)
class RunEvent:
    """Base class of the events of a run, which are dataclasses."""


@dataclass(frozen=True)
class Start(RunEvent):
    """The run begins.

    | mesh, stages    picture of the mesh, and table of the pipeline stages (empty without pp), as text
    | device      rank 0's device, and the connection between the ranks
    | parameters  number of parameters of the whole model; `trained`: of those that are trained
    | data        one line about the data
    | memory      bytes of model state on rank 0, as `Trainer.memory` returns them
    | precision   dtype of each kind of tensor on rank 0, as `Trainer.precision` returns them
    | output      path of the run's folder"""

    plan: str
    mesh: str
    stages: str
    device: str
    parameters: int
    trained: int
    data: str
    steps: int
    batch: int
    memory: dict[str, int]
    precision: dict[str, str]
    output: str


@dataclass(frozen=True)
class Budgeted(RunEvent):
    """The plan's recompute budget has set what each block recomputes; `table` shows this for rank 0."""

    step: int
    table: str


@dataclass(frozen=True)
class Resume(RunEvent):
    """The run continues in the folder of an earlier start, or begins at a checkpoint.

    | step, samples   number of steps and samples before the checkpoint was saved; 0 without a checkpoint
    | path            the checkpoint; "" if there is none yet, so that the run begins at step 1
    | changes         one line for each difference between the job and the job of the checkpoint
    | damaged         one line for each damage in newer checkpoints, which were skipped"""

    step: int
    samples: int
    path: str
    changes: list[str]
    damaged: list[str]


@dataclass(frozen=True)
class Step(RunEvent):
    """One step has ended.

    | step        number of the step, 1 … steps
    | loss        mean over the global batch
    | grad_norm   2-norm of the gradients of all parameters, before clipping
    | lr          the learning rate of this step, of the first parameter group
    | tokens      number of terms of the loss in the global batch: tokens, or samples
    | rate        `tokens` per second of this step, all ranks together
    | memory      peak bytes of rank 0 so far: allocated on its GPU, or resident in its process
    | eta         estimated seconds to the end of the last step, from the mean time of the steps so far
    | skipped     whether the update of the parameters was skipped
    | samples     size of the global batch"""

    step: int
    steps: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    rate: float
    memory: int
    eta: float
    skipped: bool
    samples: int


@dataclass(frozen=True)
class Noise(RunEvent):
    """Gradient noise, averaged over about the last 20 steps: tr(Σ) and |G|², as in `NoiseScale`.

    `critical`: the critical batch that it implies, in samples, None if noise hides the gradient; `layers`: by layer."""

    step: int
    critical: float | None
    trace: float
    square: float
    layers: dict[str, float | None]


@dataclass(frozen=True)
class NonFinite(RunEvent):
    """A loss or gradient was not finite; `problem` names the parameters, the ranks and the micro-batches."""

    step: int
    problem: str


@dataclass(frozen=True)
class Slow(RunEvent):
    """The other ranks had to wait for `rank`.

    | step      the last step of the compared steps
    | steps     the steps in which the rank was slow
    | seconds   mean busy seconds of the rank in these steps
    | others    median busy seconds of the other ranks, as a mean over these steps"""

    step: int
    rank: int
    steps: list[int]
    seconds: float
    others: float


@dataclass(frozen=True)
class Shares(RunEvent):
    """Replica i gets `rows[i]` rows of each batch after `step`; until then it was busy `seconds[i]` in a step."""

    step: int
    rows: list[int]
    seconds: list[float]


@dataclass(frozen=True)
class ExpertLoad(RunEvent):
    """The loads of the experts since the last such event.

    | mixtures  share of each mixture's busiest expert over an even share, by name; {} if no plan divides experts
    | dropped   pairs of a token and a chosen expert over `expert_capacity`, and all pairs, by name of the mixture"""

    step: int
    mixtures: Mapping[str, float]
    dropped: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Measured(RunEvent):
    """A step has been measured action by action: the step of median time among the last `steps` steps.

    | table   text table of the times, one row for each rank
    | path    the file that `meshwise draw timeline` reads"""

    step: int
    steps: int
    table: str
    path: str


@dataclass(frozen=True)
class Saved(RunEvent):
    """The checkpoint of the state after `step` is complete. It took `seconds`; training waited `held` seconds."""

    step: int
    path: str
    seconds: float
    held: float


@dataclass(frozen=True)
class SaveFailed(RunEvent):
    """The checkpoint of `step` could not be written, for the reason in `problem`; older checkpoints are unchanged."""

    step: int
    problem: str


@dataclass(frozen=True)
class Stopped(RunEvent):
    """The run ends early, after `step`. `by`: the file `stop`, or a signal; `following`: the command that continues."""

    step: int
    by: str
    following: str


@dataclass(frozen=True)
class Validation(RunEvent):
    """A validation after `step` has ended: the mean loss over `tokens` tokens (or samples) of the validation data."""

    step: int
    loss: float
    tokens: int


@dataclass(frozen=True)
class Sample(RunEvent):
    """The model has generated `text` after `prompt`."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class End(RunEvent):
    """The run has ended after `seconds`. `outputs`: paths of files by name; `following`: the next command to try."""

    steps: int
    seconds: float
    loss: float
    outputs: dict[str, str]
    following: str


class EventSink(Protocol):
    """A destination of events, such as the terminal or a file."""

    def write(self, event: RunEvent) -> None:
        """Print or write one event at once, so that a killed process loses no event."""

    def close(self) -> None:
        """Close the sink; no events follow."""


@dataclass(frozen=True)
class TrackedNumbers:
    """An event sink that passes the numbers of steps and validations to a tracker.

    | log     function of numbers by name, and the step
    | close   function that ends the tracker's run"""

    log: Callable[[Mapping[str, float], int], object]
    close: Callable[[], None]

    def write(self, event: RunEvent) -> None:
        """Log the numbers of a step or a validation; ignore other events."""
        if isinstance(event, Step):
            names = ("loss", "grad_norm", "lr", "rate", "memory")
            self.log({f"train/{name}": float(getattr(event, name)) for name in names}, event.step)
        elif isinstance(event, Validation):
            self.log({"validation/loss": event.loss}, event.step)


def logger_maker(name: str) -> Callable[[Path, Job], EventSink]:
    """Return the function that opens a logger. Raises JobError for an unknown name and for a missing extra."""
    if ":" in name:
        return locate(name, key="train.loggers")
    if name not in _TRACKERS:
        raise JobError(f"train.loggers: {name!r} is none of {', '.join(_TRACKERS)}, nor a 'module:Class' of your own")
    tracker = import_library("torch.utils.tensorboard" if name == "tensorboard" else name, key="train.loggers")
    return lambda folder, job: _TRACKERS[name](tracker, folder, to_toml(job))


def _tensorboard(tensorboard: Any, folder: Path, _job: str) -> TrackedNumbers:
    writer = tensorboard.SummaryWriter(str(folder / "tensorboard"))
    return TrackedNumbers(_one_by_one(writer.add_scalar), writer.close)


def _wandb(wandb: Any, folder: Path, job: str) -> TrackedNumbers:
    run = wandb.init(project="meshwise", name=folder.name, dir=str(folder), config={"job": job})
    return TrackedNumbers(lambda numbers, step: run.log(dict(numbers), step=step), run.finish)


def _mlflow(mlflow: Any, folder: Path, job: str) -> TrackedNumbers:
    mlflow.start_run(run_name=folder.name)
    mlflow.log_text(job, "job.toml")
    return TrackedNumbers(lambda numbers, step: mlflow.log_metrics(dict(numbers), step=step), mlflow.end_run)


def _aim(aim: Any, folder: Path, job: str) -> TrackedNumbers:
    run = aim.Run(repo=str(folder), experiment=folder.name)
    run["job"] = job
    return TrackedNumbers(_one_by_one(lambda name, value, step: run.track(value, name=name, step=step)), run.close)


def _one_by_one(log: Callable[[str, float, int], object]) -> Callable[[Mapping[str, float], int], object]:
    """Return a function that logs several numbers, from one that logs a single number by name."""
    return lambda numbers, step: [log(name, value, step) for name, value in numbers.items()]


_TRACKERS: Mapping[str, Callable[[Any, Path, str], TrackedNumbers]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "aim": _aim,
}


class JsonLines:
    """An event sink that appends each event to a file as one line of JSON, and flushes the line at once.

    The line has the event's fields, and under `event` the lower-case name of its class. An infinite number or NaN is
    written as the string `inf`, `-inf` or `nan`. If the file exists, an unfinished last line is removed first; a killed
    run may have left it."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: RunEvent) -> None:
        """Append the event as a line."""
        record = {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}
        broken = {key: str(one) for key, one in record.items() if isinstance(one, float) and not math.isfinite(one)}
        self._file.write(json.dumps(record | broken) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

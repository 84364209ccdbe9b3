"""Define the events of a training run (a step, a validation, a checkpoint …) and pass them to the progress output.

The training loop emits events through an `EventDispatcher`. Its sinks print the events (`progress_lines`) or write them
to files (`metrics_files`). Only rank 0 has sinks. In metrics.jsonl an event has the lower-case name of its class."""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True)
class Start:
    """The run begins.

    | stages      the table of the pipeline stages; empty without pp
    | device      rank 0's device, and the connection between the ranks
    | parameters  number of parameters of the whole model
    | data        one line about the data
    | memory      bytes of model state on rank 0, as `Trainer.memory` returns them
    | precision   dtype of each kind of tensor on rank 0, as `Trainer.precision` returns them
    | output      path of the run's folder"""

    plan: str
    mesh: str
    stages: str
    device: str
    parameters: int
    data: str
    steps: int
    batch: int
    memory: dict[str, int]
    precision: dict[str, str]
    output: str


@dataclass(frozen=True)
class Budgeted:
    """The plan's recompute budget has set what each block recomputes; `table` shows this for rank 0."""

    step: int
    table: str


@dataclass(frozen=True)
class Resume:
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
class Step:
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
class Noise:
    """Gradient noise, averaged over about the last 20 steps: tr(Σ) and |G|², as in `NoiseScale`.

    `critical`: the critical batch that it implies, in samples, None if noise hides the gradient; `layers`: by layer."""

    step: int
    critical: float | None
    trace: float
    square: float
    layers: dict[str, float | None]


@dataclass(frozen=True)
class NonFinite:
    """A loss or gradient was not finite; `problem` names the parameters, the ranks and the micro-batches."""

    step: int
    problem: str


@dataclass(frozen=True)
class Slow:
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
class ExpertLoad:
    """The loads of the experts since the last such event.

    | step     the last step
    | name     the mixture whose busiest expert had the largest share
    | factor   that share over an even share
    | mean     mean of these factors over all mixtures"""

    step: int
    name: str
    factor: float
    mean: float


@dataclass(frozen=True)
class Measured:
    """A step has been measured action by action: the step of median time among the last `steps` steps.

    | table   text table of the times, one row for each rank
    | path    the file that `meshwise draw timeline` reads"""

    step: int
    steps: int
    table: str
    path: str


@dataclass(frozen=True)
class Saved:
    """The checkpoint of the state after `step` is complete. It took `seconds`; training waited `held` seconds."""

    step: int
    path: str
    seconds: float
    held: float


@dataclass(frozen=True)
class SaveFailed:
    """The checkpoint of `step` could not be written, for the reason in `problem`; older checkpoints are unchanged."""

    step: int
    problem: str


@dataclass(frozen=True)
class Stopped:
    """The run ends after `step`, before its last one, because the file `stop` was in its folder."""

    step: int


@dataclass(frozen=True)
class Validation:
    """A validation after `step` has ended: the mean loss over `tokens` tokens (or samples) of the validation data."""

    step: int
    loss: float
    tokens: int


@dataclass(frozen=True)
class Sample:
    """The model has generated `text` after `prompt`."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class End:
    """The run has ended after `seconds`. `outputs`: paths of files by name; `following`: the next command to try."""

    steps: int
    seconds: float
    loss: float
    outputs: dict[str, str]
    following: str


Event: TypeAlias = (
    Start
    | Resume
    | Step
    | Noise
    | NonFinite
    | Budgeted
    | Slow
    | ExpertLoad
    | Measured
    | Saved
    | SaveFailed
    | Stopped
    | Validation
    | Sample
    | End
)
"""Any event of a run."""


class EventSink(Protocol):
    """A destination of events, such as the terminal or a file."""

    def write(self, event: Event) -> None:
        """Print or write one event at once, so that a killed process loses no event."""

    def close(self) -> None:
        """Close the sink; no events follow."""


class EventDispatcher(contextlib.ExitStack):
    """Passes each event of a run to all sinks; as a context manager it closes the sinks at the end."""

    def __init__(self, sinks: Sequence[EventSink] = ()) -> None:
        super().__init__()
        self._sinks = tuple(sinks)
        for sink in reversed(self._sinks):
            self.callback(sink.close)

    def emit(self, event: Event) -> None:
        """Pass an event to every sink."""
        for sink in self._sinks:
            sink.write(event)


def event_record(event: Event) -> dict[str, Any]:
    """Return the event as a dict: its fields, and under `event` the lower-case name of its class."""
    return {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}

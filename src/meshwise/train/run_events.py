"""The events of a run, as typed values, and `EventDispatcher`, which hands each event to all sinks.

The loop only emits events; sinks print them (`progress_lines`) and write them to files (`metrics_files`). Only rank 0
has sinks.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True)
class Start:
    """The run begins.

    | stages      the table of the cut, with pp; else empty
    | memory      bytes of model state on rank 0, by kind
    | precision   dtypes of the same kinds
    """

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
    """The recompute budget has chosen what the blocks of rank 0 recompute, shown in `table`."""

    step: int
    table: str


@dataclass(frozen=True)
class Resume:
    """The run resumes from a checkpoint.

    | step, samples   done before the checkpoint was saved
    | path            the checkpoint; empty if there was none yet, and the run begins in the folder of an earlier start
    | changes         differences between the job and the job of the checkpoint
    | damaged         damage in newer checkpoints, which were skipped
    """

    step: int
    samples: int
    path: str
    changes: list[str]
    damaged: list[str]


@dataclass(frozen=True)
class Step:
    """One step has ended.

    | step        1 … steps
    | loss        mean over the global batch
    | grad_norm   norm of all gradients, before clipping
    | lr          the learning rate of this step
    | tokens      count of the loss, over the whole global batch
    | rate        tokens per second of this step, all ranks together
    | memory      peak bytes of rank 0 so far: allocated on its GPU, or resident in its process
    | eta         seconds to the end of the last step, at the mean pace so far
    | skipped     whether the update was skipped
    """

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


@dataclass(frozen=True)
class NonFinite:
    """A loss or gradient was not finite; `problem` names the parameters, the ranks and the micro-batches."""

    step: int
    problem: str


@dataclass(frozen=True)
class Slow:
    """A rank that the other ranks waited for.

    | step      the last step of the window that was compared
    | steps     the steps in which the rank was slow
    | seconds   its mean busy time in these steps
    | others    the mean of the other ranks' median busy time in these steps
    """

    step: int
    rank: int
    steps: list[int]
    seconds: float
    others: float


@dataclass(frozen=True)
class Measured:
    """The times of the actions of one step: of the last `steps` steps, the one of median time.

    | table   a text table with a row per rank
    | path    the file for `meshwise draw timeline`
    """

    step: int
    steps: int
    table: str
    path: str


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the state after `step` is complete. It took `seconds`; training waited for `held` seconds."""

    step: int
    path: str
    seconds: float
    held: float


@dataclass(frozen=True)
class SaveFailed:
    """The checkpoint of `step` could not be written; older checkpoints are unchanged."""

    step: int
    problem: str


@dataclass(frozen=True)
class Validation:
    """The loss over the validation data (or `validate_batches` of it)."""

    step: int
    loss: float
    tokens: int


@dataclass(frozen=True)
class Sample:
    """Text that the model generated after `prompt`."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Compared:
    """The prediction for the plan on the cluster `on`, and what rank 0 measured.

    | seconds   the median step time, without the first step
    | memory    peak bytes, less what the process held before it had a trainer (interpreter and libraries)
    """

    on: str
    predicted_seconds: float
    predicted_memory: int
    seconds: float
    memory: int


@dataclass(frozen=True)
class End:
    """The run has ended: its output files by name, and the next command to try."""

    steps: int
    seconds: float
    loss: float
    outputs: dict[str, str]
    following: str


Event: TypeAlias = (
    Start
    | Resume
    | Step
    | NonFinite
    | Budgeted
    | Slow
    | Measured
    | Saved
    | SaveFailed
    | Validation
    | Sample
    | Compared
    | End
)


class EventSink(Protocol):
    """A destination of events."""

    def write(self, event: Event) -> None:
        """Write one event so that it survives the end of the process."""

    def close(self) -> None:
        """Close the sink: no more events follow."""


class EventDispatcher:
    """The events of one run; a context manager that closes the sinks."""

    def __init__(self, sinks: Sequence[EventSink] = ()) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        """Hand an event to every sink."""
        for sink in self._sinks:
            sink.write(event)

    def __enter__(self) -> "EventDispatcher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()


def event_record(event: Event) -> dict[str, Any]:
    """Return the event as a dict, with its name under `event`: a line of metrics.jsonl."""
    return {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}

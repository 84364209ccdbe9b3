"""What happens in a run, as one stream of typed values.

A loop that prints here, logs there and writes metrics somewhere else tells each of them something different. Here the
loop emits events, and sinks write them: `terminal` for people, `records` for files. Rank 0 has the sinks; on the other
ranks the same stream goes nowhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True)
class Start:
    """The run begins. Memory is bytes of model state on rank 0, by kind, precision its dtypes; `stages` the table
    of the cut, with pp.
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
    """A budget has picked what the blocks of rank 0 compute again, by this table."""

    step: int
    table: str


@dataclass(frozen=True)
class Resume:
    """The run goes on where a checkpoint was.

    step, samples   done before it was saved
    path            the checkpoint; empty when there was none yet, and the run begins in the folder of an earlier start
    changes         what of the job differs from the one that saved it
    damaged         what was wrong with newer checkpoints that were passed over
    """

    step: int
    samples: int
    path: str
    changes: list[str]
    damaged: list[str]


@dataclass(frozen=True)
class Step:
    """One step is over.

    step        1 … steps
    loss        mean over the global batch
    grad_norm   of all parameters, before clipping
    lr          the learning rate of this step
    tokens      what the loss counted, over the whole global batch
    rate        tokens per second of this step, all ranks together
    memory      bytes rank 0 has used at most so far: of its GPU, or resident in its process
    eta         seconds to the last step, at the mean pace so far
    skipped     whether the update was left out
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
    """A rank that the others waited for: `seconds` and `others` are the mean busy times of it and of them in `steps`.

    `step` is the last step that was looked at.
    """

    step: int
    rank: int
    steps: list[int]
    seconds: float
    others: float


@dataclass(frozen=True)
class Measured:
    """Where the time of a step went: the one of the last `steps` steps whose time is the median, action by action.

    table   per rank, in words
    path    the file for `meshwise draw timeline`
    """

    step: int
    steps: int
    table: str
    path: str


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the state after `step` is complete, `seconds` after it was begun; training stood for `held`."""

    step: int
    path: str
    seconds: float
    held: float


@dataclass(frozen=True)
class SaveFailed:
    """There is no checkpoint of `step`, and why; those from before are as they were."""

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
    """Text that the model wrote after `prompt`."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Compared:
    """What was predicted of the plan, on the cluster `on`, and what rank 0 measured: the median of its steps after the
    first, and the most bytes it used, less what its process held before there was a trainer: the interpreter and
    the libraries, which nothing predicts.
    """

    on: str
    predicted_seconds: float
    predicted_memory: int
    seconds: float
    memory: int


@dataclass(frozen=True)
class End:
    """The run is over: what it came to, what is where, and the next command to try."""

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
    """Somewhere events are written."""

    def write(self, event: Event) -> None:
        """Write one event; what is written survives the process."""

    def close(self) -> None:
        """Close the sink: no more events follow."""


class Events:
    """The stream of one run; a context manager that closes the sinks."""

    def __init__(self, sinks: Sequence[EventSink] = ()) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        """Hand an event to every sink."""
        for sink in self._sinks:
            sink.write(event)

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            sink.close()


def record(event: Event) -> dict[str, Any]:
    """Return the event as a plain mapping, its kind under `event`: the line of metrics.jsonl."""
    return {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}

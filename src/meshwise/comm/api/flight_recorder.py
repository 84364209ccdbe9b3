"""Record the collective calls of one rank and its position: the collective that it waits for, or called last.

Ranks hang when their calls differ: in the kind, in the size, or in the number of calls. So every call gets a record.
Each rank keeps its records in one flight recorder, which all views of its world share. Hang reports, tests and
simulations read the flight recorder.

A record must be cheap, because a small collective takes little longer than making its record. So records are named
tuples, which take a third of the time of a frozen dataclass.

`ActivityStopwatch` measures when a rank begins each activity of a step, and how long it waits in collectives;
`FlightRecorder.profiled` shows both to a profiler. Each time is taken by an event on the current CUDA stream, or on the
CPU by the clock. So on a GPU the times are GPU times, and the host does not wait for the GPU before `read`.

`stack_of` returns a Python stack for reports, without the frames that wait in a collective or start a thread."""

import contextlib
import gc
import math
import multiprocessing
import os
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeAlias

import torch
from torch.profiler import record_function

from meshwise.comm.api.streams import StreamEvent, Streams

_TORCH = f"{Path(torch.__file__).parent}/"
_NOT_CALLERS = (f"{Path(__file__).parent}/", _TORCH)
_KEPT = 1024
_MESSAGES = ("send", "recv")
_SIZES_MAY_DIFFER = ("all_to_all", "gather", "scatter")
_SPLIT = ("all_gather", "reduce_scatter", *_SIZES_MAY_DIFFER)


class CallRecord(NamedTuple):
    """Record of one collective as one rank called it. The calls of two ranks match if their `signature` is equal.

    | sequence     number of calls that the rank had made before
    | kind         name of the method of `World`, such as `all_reduce`
    | axes         axes of the group that have more than one rank
    | shape        shape of the tensor, or `(elements,)` of a list of parts
    | dtype        torch's name without `torch.`; "" for a call without tensors
    | bytes        size of the tensor with this shape: the result of an all-gather, the full input of a reduce-scatter
    |              or all-to-all, this rank's part in a gather or scatter
    | site         file, line and function of the caller
    | how          operation and group index of the root, such as `sum`, `max to 1`, `from 0`"""

    sequence: int
    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    site: str
    how: str = ""

    @property
    def point_to_point(self) -> bool:
        """True for a send or a recv."""
        return self.kind in _MESSAGES

    @property
    def signature(self) -> str:
        """Text that must be equal on every rank of the group: kind, operation, root, number of elements, dtype. For a
        send and its recv, number and dtype alone; for all-to-all, gather and scatter, all but the number."""
        return _signature(self.kind, self.how, self.shape, self.dtype)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        how = f" {self.how}" if self.how else ""
        payload = f" {shape} {self.dtype}" if self.dtype else ""
        return f"#{self.sequence} {self.kind}[{'·'.join(self.axes)}]{how}{payload} at {self.site}"


@lru_cache(maxsize=4096)
def _signature(kind: str, how: str, shape: tuple[int, ...], dtype: str) -> str:
    elements = "" if kind in _SIZES_MAY_DIFFER else f" {math.prod(shape)} elements"
    call = "message" if kind in _MESSAGES else f"{kind} {how}"
    return f"{call}{elements} {dtype}"


def bus_factor(kind: str, *, ranks: int) -> float:
    """Return the bytes that each of `ranks` ranks sends by the best algorithm for `kind`, divided by the bytes of the
    full tensor. nccl-tests give it as bus bandwidth / algorithm bandwidth. 1 for messages, broadcast and reduce."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in _SPLIT else 1.0


class CallLine(NamedTuple):
    """Ranks whose calls are counted together: a group, or the source and target of messages, in this order."""

    ranks: tuple[int, ...]
    point_to_point: bool = False


class PlacedCall(NamedTuple):
    """A record, its line, and its number on the line from 0. Calls of equal number on one line are one collective."""

    record: CallRecord
    line: CallLine
    ordinal: int


class Position(NamedTuple):
    """Collective that a rank waits for now, or else the last collective that it called. record: None before the first
    call. waiting_since: start of the wait by `time.monotonic`; None if the rank does not wait."""

    record: CallRecord | None = None
    waiting_since: float | None = None


class RanksDisagree(RuntimeError):
    """Raised when ranks called different collectives, or when a rank waits for a call that cannot come."""


class StepPhase(StrEnum):
    """Phase of a step before or after the actions of the pipeline's schedule."""

    OUTSIDE = ""
    """No step runs."""
    BEGIN = "begin"
    """Before the first action: the batch is cut into micro-batches."""
    SETTLE = "settle"
    """After the last action: gradients of tied parameters are summed, and gradient reductions are completed."""
    EXCHANGE = "exchange"
    """The ranks add up losses, counts and norms."""
    UPDATE = "update"
    """The optimizer updates the parameters."""
    AGREE = "agree"
    """After a step, replicas that agree across steps exchange parameters."""


Activity: TypeAlias = Hashable
"""A `StepPhase`, or an action of a pipeline's schedule; `str` of it is one word."""


@dataclass(frozen=True)
class TimedSpan:
    """Time span of an activity, of a wait in a collective, or of work of another thread; times in seconds."""

    what: Activity
    """Activity (`FlightRecorder.doing`), or the name of the collective (`all_reduce dp`) or of the other work."""
    start: float
    stop: float
    waits: bool = False
    """True for a wait in a collective."""
    in_background: bool = False
    """True for work of another thread of the rank, at the same time as the activities."""


class ActivityStopwatch:
    """Stopwatch for the activities and waits of one rank; `background`: work of its other threads."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        streams.synchronize()
        self._began, self._origin = time.monotonic(), self.now()  # one moment, by the host's clock and as an event
        self._marks: list[tuple[Activity, StreamEvent]] = []
        self._waits: list[tuple[str, StreamEvent, StreamEvent]] = []
        self.background: list[TimedSpan] = []

    def now(self) -> StreamEvent:
        """Return an event with a time, recorded on the current stream."""
        return self._streams.mark(timing=True)

    def begins(self, what: Activity) -> None:
        """End the current activity and begin `what`, which may be `StepPhase.OUTSIDE`."""
        self._marks.append((what, self.now()))

    def waited(self, what: str, *, since: StreamEvent) -> None:
        """Add a wait for the collective `what` that began at the event `since` and ends now."""
        self._waits.append((what, since, self.now()))

    def read(self, *, offset: float = 0.0) -> list[TimedSpan]:
        """Return this rank's activities in order, then its waits, then the work of its other threads. Blocks the host
        until the GPU has reached the last event. offset: seconds to subtract from all times."""
        marks = [(what, self._at(moment) - offset) for what, moment in self._marks]
        spans = [
            TimedSpan(what, start, stop) for (what, start), (_, stop) in pairwise(marks) if what != StepPhase.OUTSIDE
        ]
        for what, since, until in self._waits:
            start, stop = (self._at(moment) - offset for moment in (since, until))
            spans.append(TimedSpan(what, start, stop, waits=True))
        background = (replace(one, start=one.start - offset, stop=one.stop - offset) for one in self.background)
        return [*spans, *background]

    def _at(self, event: StreamEvent) -> float:
        """Return the time of an event, in seconds of `time.monotonic`; block the host until the event has happened."""
        event.synchronize()
        return self._began + float(self._origin.elapsed_time(event)) / 1e3


class FlightRecorder:
    """Record of the calls of one rank and of its position.

    | process      PID of the rank
    | calls        number of calls so far
    | counts       number of calls so far on each line
    | recent       the last 1024 calls
    | position     collective that the rank waits for, or the last collective that it called
    | thread       identifier of the thread that made the last call or began the current activity
    | called_at    time of the last call, by `time.monotonic`
    | waited       seconds that the rank has spent waiting in collectives so far
    | digests      for each group, by its ranks: CRC32 of the signatures of all its collectives so far"""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.calls = 0
        self.counts: dict[CallLine, int] = {}
        self.recent: deque[PlacedCall] = deque(maxlen=_KEPT)
        self.position = Position()
        self.thread = threading.get_ident()
        self.called_at = time.monotonic()
        self.waited = 0.0
        self._waiter: int | None = None
        self._doing: Activity = StepPhase.OUTSIDE
        self._stopwatch: ActivityStopwatch | None = None
        self._range: contextlib.ExitStack | None = None
        self.digests: dict[tuple[int, ...], int] = {}
        self._recordings: list[list[CallRecord]] = []

    @property
    def doing(self) -> Activity:
        """Current activity of the rank. The code that runs the step sets it."""
        return self._doing

    @doing.setter
    def doing(self, what: Activity) -> None:
        self._doing = what
        self.thread = threading.get_ident()
        if self._stopwatch is not None:
            self._stopwatch.begins(what)
        if self._range is not None:
            self._range.close()
            if what != StepPhase.OUTSIDE:
                self._range.enter_context(record_function(str(what)))

    def write(self, record: CallRecord, *, ranks: tuple[int, ...]) -> None:
        """Store the record of a call that is about to be made, and make it the position of the rank. ranks: the ranks
        of the group; for a send or recv, the source and the target. Raises RuntimeError in a fork of the rank's
        process, and while another thread of the rank waits in a collective."""
        self._require_own(record)
        line = CallLine(ranks, record.point_to_point)
        ordinal = self.counts.get(line, 0)
        self.calls += 1
        self.counts[line] = ordinal + 1
        self.recent.append(PlacedCall(record, line, ordinal))
        self.position = Position(record)
        self.thread = threading.get_ident()
        self.called_at = time.monotonic()
        if not record.point_to_point:
            self.digests[ranks] = zlib.crc32(record.signature.encode(), self.digests.get(ranks, 0))
        for recording in self._recordings:
            recording.append(record)
        if self._range is not None:
            with record_function(f"start {record.kind} {'·'.join(record.axes)}"):
                pass  # a mark: ranges of a thread are nested, and a collective overlaps with others

    def waiting(self, record: CallRecord) -> "_Waiting":
        """Return a context manager that marks this rank as waiting for `record`; such blocks may be nested. Raises
        RuntimeError in a fork of the rank's process, and while another thread of the rank waits."""
        self._require_own(record)
        return _Waiting(self, record)

    def _require_own(self, record: CallRecord) -> None:
        if os.getpid() != self.process:
            raise RuntimeError(
                f"process {os.getpid()} is a fork of a rank, process {self.process}, and called {record.kind}; "
                "only the rank may call collectives. Let the fork compute without them, or end it with os._exit"
            )
        if self._waiter is not None and self._waiter != threading.get_ident():
            raise RuntimeError(
                f"a thread calls {record} while another thread of this rank waits in {self.position.record}; call the "
                "collectives of a rank from one thread at a time"
            )

    @contextlib.contextmanager
    def record(self) -> Iterator[list[CallRecord]]:
        """Collect the records of the calls made inside the block."""
        records: list[CallRecord] = []
        self._recordings.append(records)
        try:
            yield records
        finally:
            self._recordings = [kept for kept in self._recordings if kept is not records]

    def add_background(self, events: Iterable[tuple[str, float, float]]) -> None:
        """Add activities of this rank's other threads to the times of the `timed` block; outside a block, do nothing.
        events: (activity, start, stop), with times of `time.monotonic`."""
        if self._stopwatch is not None:
            self._stopwatch.background += [TimedSpan(*event, in_background=True) for event in events]

    @contextlib.contextmanager
    def timed(self, streams: Streams) -> Iterator[ActivityStopwatch]:
        """Measure the rank's activities and waits inside the block. Raises RuntimeError inside another such block."""
        if self._stopwatch is not None:
            raise RuntimeError("this rank is in a `timed` block already; end that block first")
        self._stopwatch = ActivityStopwatch(streams)
        try:
            yield self._stopwatch
        finally:
            self._stopwatch = None

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """Show the rank's activities, calls and waits inside the block to torch's profiler, as ranges. Inside
        `torch.autograd.profiler.emit_nvtx()` they are NVTX ranges, for Nsight Systems."""
        self._range = contextlib.ExitStack()
        try:
            yield
        finally:
            self._range.close()
            self._range = None


class _Waiting:
    """Block in which a rank waits. It is a class: a context manager from a generator takes as long as a small call."""

    def __init__(self, flight_recorder: FlightRecorder, record: CallRecord) -> None:
        self._flight_recorder = flight_recorder
        self._record = record

    def __enter__(self) -> None:
        flight_recorder = self._flight_recorder
        self._outer, flight_recorder._waiter = flight_recorder._waiter, threading.get_ident()
        self._before, self._watch = flight_recorder.position, flight_recorder._stopwatch
        self._since = time.monotonic()
        flight_recorder.position = Position(self._record, self._since)
        self._moment = None if self._watch is None else self._watch.now()
        self._range = None if flight_recorder._range is None else record_function(f"wait {self._what}")
        if self._range is not None:
            self._range.__enter__()

    @property
    def _what(self) -> str:
        return f"{self._record.kind} {'·'.join(self._record.axes)}"

    def __exit__(self, *_: object) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        flight_recorder = self._flight_recorder
        flight_recorder._waiter = self._outer
        flight_recorder.position = self._before
        if self._before.waiting_since is None:
            flight_recorder.waited += time.monotonic() - self._since
            if self._watch is not None and self._moment is not None:
                self._watch.waited(self._what, since=self._moment)


def disagreement(records: Mapping[int, CallRecord]) -> str | None:
    """Return a text with one line for each group of ranks that made the same call, largest group first. Return None if
    all calls match. `records`: by rank, the call that should be the same on all ranks."""
    parties: dict[tuple[str, str], list[int]] = {}
    for rank, record in sorted(records.items()):
        parties.setdefault((record.signature, record.site), []).append(rank)
    if len({signature for signature, _ in parties}) < 2:
        return None
    return "\n".join(
        f"  {ranks_text(ranks):<14} {records[ranks[0]]}"
        for ranks in sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks))
    )


def first_difference(recent: Mapping[int, Sequence[PlacedCall]]) -> tuple[str, tuple[int, ...]] | None:
    """Return the first difference between the recent calls of the ranks: a message and the ranks that made the calls.
    Return None when there is no difference. `recent`: the last calls of each rank, by rank."""
    places: dict[tuple[int, CallLine], dict[int, CallRecord]] = {}
    for rank, calls in recent.items():
        for call in calls:
            places.setdefault((call.ordinal, call.line), {})[rank] = call.record
    for (_, line), records in sorted(places.items(), key=lambda item: item[0][0]):
        if table := disagreement(records):
            ranks = ranks_text(line.ranks)
            return f"{ranks} called different collectives where they have to call the same:\n{table}", tuple(records)
    return None


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks as text: `rank 3`, `ranks 0,1,4`, and for many `ranks 0,1,2,3,4,5,6,7 and 56 more`."""
    shown = ",".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


_MOST_FRAMES = 12
_OURS = f"{Path(__file__).parents[2]}/"
_PYTHON = f"{sysconfig.get_paths()['stdlib']}/"

# Frames that wait in a collective or start a process or thread do not help the reader.
_LEFT_OUT = (
    f"{Path(__file__).parents[1]}/",
    f"{Path(multiprocessing.__file__).parent}/",
    f"{_TORCH}multiprocessing/",
    f"{_TORCH}distributed/",
    threading.__file__,
    "<",
)


def stack_of(thread: int | None) -> str:
    """Return the innermost 12 frames of the thread with this identifier as text, the outermost first. Return "" if the
    thread has ended or the identifier is None.

    Garbage collection is off while the frames are read. Otherwise Python might collect garbage while it makes a frame
    object, and switch threads; the other thread could return from the frame, and its memory would be reused. Reading
    such memory ended ranks with SIGSEGV."""
    collects = gc.isenabled()
    gc.disable()
    try:
        frame = None if thread is None else sys._current_frames().get(thread)
        frames = [] if frame is None else list(traceback.walk_stack(frame))
    finally:
        if collects:
            gc.enable()
    summary = traceback.StackSummary.extract(iter(frames))
    entries = [entry for entry in reversed(summary) if not entry.filename.startswith(_LEFT_OUT)]
    lines = [] if len(entries) <= _MOST_FRAMES else [f"… {len(entries) - _MOST_FRAMES} outer frames"]
    for entry in entries[-_MOST_FRAMES:]:
        lines.append(f"{entry.filename}:{entry.lineno} {entry.name}")
        if entry.line:
            lines.append(f"    {entry.line}")
    return "\n".join(f"      {line}" for line in lines)


def raised_at(error: BaseException) -> str:
    """Return `file:line function` of the innermost frame of an exception in the user's code. Without such a frame, use
    the innermost frame outside torch; without that, the innermost frame."""
    entries = traceback.extract_tb(error.__traceback__)
    others = [entry for entry in entries if not entry.filename.startswith(_TORCH)]
    own = [one for one in others if "site-packages" in one.filename or not one.filename.startswith((_PYTHON, "<"))]
    theirs = [entry for entry in own if not entry.filename.startswith(_OURS)]
    entry = (theirs or others or entries)[-1]
    return f"{entry.filename}:{entry.lineno} {entry.name}"


def call_site() -> str:
    """Return `folder/file:line function` of the innermost caller outside this folder and torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_CALLERS):
        frame = frame.f_back
    if frame is None:
        return "interpreter exit"
    return _site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@lru_cache(maxsize=4096)
def _site(file: str, number: int, name: str) -> str:
    return f"{'/'.join(file.rsplit(os.sep, 2)[-2:])}:{number} {name}"

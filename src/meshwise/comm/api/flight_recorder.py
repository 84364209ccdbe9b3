"""Record the collective calls of one rank and its position.

Ranks hang because they disagree: another collective, another size, one call more or less. So every call gets a record,
and each rank keeps its records in one flight recorder that all views of its world share. Everything that explains a run
reads it: the hang report, the recordings of a test or a simulation.

Every call makes several of these values, and a small call takes little longer than that. So they are named tuples,
which take a third of the time of frozen dataclasses.
"""

import contextlib
import math
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from meshwise.comm.api.stopwatch import Activity, ActivityStopwatch, StepPhase

_NOT_CALLERS = (f"{Path(__file__).parent}/", f"{Path(torch.__file__).parent}/")
_KEPT = 1024
_MESSAGES = ("send", "recv")
_SIZES_MAY_DIFFER = ("all_to_all", "gather", "scatter")


class CallRecord(NamedTuple):
    """Record of one collective as one rank called it. The ranks of a group agree when `agreed` is equal on all of them.

    `bytes` is the payload of the whole collective as one rank sees it. For a broadcast, reduce, all-reduce, send or
    recv it is the tensor; for an all-gather the gathered side. For a reduce-scatter or all-to-all it is the whole side;
    for a gather or scatter this rank's part. `how` names the operation and the group index of the root: `sum`, `max to
    1`, `from 0`.
    """

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
        """True if this is one end of a message rather than a collective."""
        return self.kind in _MESSAGES

    @property
    def agreed(self) -> str:
        """Text that must be equal on every rank of the group: kind, operation, root, elements, dtype.

        The two ends of a message agree when the elements and the dtype do.
        """
        return _agreed(self.kind, self.how, self.shape, self.dtype)

    @property
    def tag(self) -> int:
        """Hash of `agreed` as an integer."""
        return _tag(self.agreed)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        how = f" {self.how}" if self.how else ""
        payload = f" {shape} {self.dtype}" if self.dtype else ""
        return f"#{self.sequence} {self.kind}[{'·'.join(self.axes)}]{how}{payload} at {self.site}"


@lru_cache(maxsize=4096)
def _agreed(kind: str, how: str, shape: tuple[int, ...], dtype: str) -> str:
    elements = "" if kind in _SIZES_MAY_DIFFER else f" {math.prod(shape)} elements"
    call = "message" if kind in _MESSAGES else f"{kind} {how}"
    return f"{call}{elements} {dtype}"


@lru_cache(maxsize=4096)
def _tag(agreed: str) -> int:
    return zlib.crc32(agreed.encode())


class CallLine(NamedTuple):
    """Ranks whose calls come in one order: a group, or the source and target of messages."""

    ranks: tuple[int, ...]
    point_to_point: bool = False


class PlacedCall(NamedTuple):
    """A record with its place: call number `ordinal` of its line. Ranks meet in equal ordinals of one line."""

    record: CallRecord
    line: CallLine
    ordinal: int


class Position(NamedTuple):
    """Position of a rank: the collective it waits for and since when, or the last one it called (waiting_since None).

    `waiting_since` is a time of `time.monotonic`.
    """

    record: CallRecord | None = None
    waiting_since: float | None = None


class RanksDisagree(RuntimeError):
    """The collectives that the ranks called do not fit together, or one of them never comes."""


class FlightRecorder:
    """The calls of one rank: how many (in all, and on each line), the last ones, a digest per group, the position.

    `thread` is the identifier of the thread that made the last call, `called_at` its time by `time.monotonic`.
    `waited`: seconds that this rank has spent waiting so far. `process`: the one whose calls these are.
    """

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
        self.digests: dict[tuple[int, ...], int] = {}
        self._recordings: list[list[CallRecord]] = []

    @property
    def doing(self) -> Activity:
        """Activity of the rank between its calls. The code that runs the step sets it."""
        return self._doing

    @doing.setter
    def doing(self, what: Activity) -> None:
        self._doing = what
        if self._stopwatch is not None:
            self._stopwatch.begins(what)

    def write(self, record: CallRecord, *, ranks: tuple[int, ...]) -> None:
        """Keep a call that is about to be made among `ranks` (of a message: its source and target).

        Raises RuntimeError in a forked copy of the process, which is not the rank, and while another thread of the rank
        waits in a collective.
        """
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
            self.digests[ranks] = zlib.crc32(record.agreed.encode(), self.digests.get(ranks, 0))
        for recording in self._recordings:
            recording.append(record)

    def waiting(self, record: CallRecord) -> "_Waiting":
        """Mark this rank as waiting for `record` inside the block; one may stand in another.

        Raises RuntimeError in a copy of the process, and while another thread waits.
        """
        self._require_own(record)
        return _Waiting(self, record)

    def _require_own(self, record: CallRecord) -> None:
        if os.getpid() != self.process:
            raise RuntimeError(
                f"process {os.getpid()} is a copy of a rank, process {self.process}, which alone calls {record.kind}; "
                "a copy ends with os._exit, or computes and leaves calls to the rank"
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
        """Note activities of other threads of this rank inside `timed`, as (what, start, stop) by `time.monotonic`."""
        if self._stopwatch is not None:
            for what, start, stop in events:
                self._stopwatch.add_background(what, start=start, stop=stop)

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[ActivityStopwatch]:
        """Note what the rank does inside the block, and what it waits for, and when.

        Raises RuntimeError inside another such block.
        """
        if self._stopwatch is not None:
            raise RuntimeError("the times of this rank are being noted already; end the block that does it first")
        self._stopwatch = ActivityStopwatch(device)
        try:
            yield self._stopwatch
        finally:
            self._stopwatch = None


class _Waiting:
    """A block in which a rank waits. A small call takes little longer than a context manager made of a generator."""

    def __init__(self, flight_recorder: FlightRecorder, record: CallRecord) -> None:
        self._flight_recorder = flight_recorder
        self._new_record = record

    def __enter__(self) -> None:
        flight_recorder = self._flight_recorder
        self._outer, flight_recorder._waiter = flight_recorder._waiter, threading.get_ident()
        self._before, self._watch = flight_recorder.position, flight_recorder._stopwatch
        self._since = time.monotonic()
        flight_recorder.position = Position(self._new_record, self._since)
        self._moment = None if self._watch is None else self._watch.now()

    def __exit__(self, *_: object) -> None:
        flight_recorder = self._flight_recorder
        flight_recorder._waiter = self._outer
        flight_recorder.position = self._before
        if self._before.waiting_since is None:
            flight_recorder.waited += time.monotonic() - self._since
            if self._watch is not None and self._moment is not None:
                self._watch.waited(f"{self._new_record.kind} {'·'.join(self._new_record.axes)}", since=self._moment)


def disagreement(records: Mapping[int, CallRecord]) -> str | None:
    """Return a table of what each rank called, largest agreeing party first; None when the ranks agree.

    `records`: by rank, the call each made in the place where all should have made the same.
    """
    parties: dict[tuple[str, str], list[int]] = {}
    for rank, record in sorted(records.items()):
        parties.setdefault((record.agreed, record.site), []).append(rank)
    if len({agreed for agreed, _ in parties}) < 2:
        return None
    lines = [
        f"  {ranks_text(ranks):<14} {records[ranks[0]]}"
        for ranks in sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks))
    ]
    return "\n".join(lines)


def first_difference(recent: Mapping[int, Sequence[PlacedCall]]) -> tuple[str, tuple[int, ...]] | None:
    """Return the first difference between the last calls of the ranks: a message and the ranks involved, or None."""
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
    """`rank 3`, `ranks 0,1,4`, and for many `ranks 0,1,2,3,4,5,6,7 and 56 more`."""
    shown = ",".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def call_site() -> str:
    """`folder/file:line function` of the nearest caller outside this folder and torch (which runs backwards)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_CALLERS):
        frame = frame.f_back
    if frame is None:
        return "interpreter exit"
    return _site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@lru_cache(maxsize=4096)
def _site(file: str, number: int, name: str) -> str:
    tail = "/".join(file.rsplit(os.sep, 2)[-2:])
    return f"{tail}:{number} {name}"

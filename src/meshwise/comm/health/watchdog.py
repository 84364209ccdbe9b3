"""Watch over a rank with a thread, and end a job that hangs with one report.

The thread of each rank reads the rank's flight recorder. The threads exchange messages through the job's store, which
works when collectives do not. A thread needs no help from the main thread, which may be blocked in C++.

One waiting rank does not show the cause, so a `RankSurvey` compares the answers of all ranks. docs/faults.md has the
events, what the watchdog does at each, the causes, and the times of their reports ("Detection")."""

import contextlib
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import NoReturn, TypeAlias

from torch.distributed import distributed_c10d as c10d

from meshwise.comm.api.flight_recorder import CallLine, CallRecord, PlacedCall, first_difference, ranks_text, stack_of
from meshwise.comm.api.launcher_info import LauncherProcess, RankLostError, has_ended
from meshwise.comm.api.world import World

_MOST_LINES = 16
_MOST_STACKS = 4

STALL_SECONDS = 300.0
"""Default for how long a rank may wait in one collective, in seconds."""

_VARIABLE = "MESHWISE_STALL_SECONDS"
_CALLS_SENT = 64
_RANKS_PER_BEAT = 500
_STORE_SECONDS = 20


@dataclass(frozen=True)
class RankAnswer:
    """Answer of one rank to a survey.

    | process     `process PID on HOST`
    | waiting     call that blocks the rank, else None. On a GPU mostly None, because a wait blocks only the stream
    | waited      seconds in that call; on a GPU, seconds since the last call; 0 if the rank does not wait
    | recent      last calls of the rank, oldest first; on a GPU any of them may be the call that does not complete
    | counts      number of calls so far on each line (`CallLine`)
    | stack       Python stacks of the rank as text
    | lost        message of the RankLostError that the rank raised; "" if none
    | unfinished  on a GPU, the oldest call that the host has passed and the GPU has not; None if there is none"""

    rank: int
    process: str
    waiting: PlacedCall | None
    waited: float
    recent: Sequence[PlacedCall]
    counts: Mapping[CallLine, int]
    stack: str
    lost: str = ""
    unfinished: CallRecord | None = None


@dataclass(frozen=True)
class AbsentRank:
    """A rank that did not answer a survey."""

    what: str
    """State of the rank, as a predicate: `has finished`."""
    finished: bool = False
    stack: str = ""
    """Last known Python stacks of the rank, with a headline; "" if unknown."""
    counts: Mapping[CallLine, int] = field(default_factory=dict)
    """Number of calls on each line, if the rank has finished; else empty."""


@dataclass(frozen=True)
class HangFinding:
    """Cause of the wait of some ranks."""

    headline: str
    ranks: tuple[int, ...]
    """Ranks whose stacks the report shows."""
    certain: bool
    """True if waiting longer cannot help."""


@dataclass(frozen=True)
class RankSurvey:
    """Answers of the ranks to one survey, by rank, and the ranks that did not answer, by rank."""

    size: int
    answers: Mapping[int, RankAnswer]
    absent: Mapping[int, AbsentRank]

    def finding(self) -> HangFinding | None:
        """Return the cause of the wait, or None if no rank waits."""
        if difference := first_difference({rank: answer.recent for rank, answer in self.answers.items()}):
            return HangFinding(*difference, certain=True)
        return self._lost() or self._finished() or self._circle() or self._slow()

    def report(self, finding: HangFinding) -> str:
        """Return the text of a report: the finding, the position of each rank (of at most 16), and up to 4 stacks."""
        ranks = list(range(self.size))
        if self.size > _MOST_LINES:
            waiting = {rank for rank, answer in self.answers.items() if answer.waiting}
            ranks = sorted(ranks, key=lambda rank: rank in waiting)[:_MOST_LINES]
        more = [f"  … and {self.size - len(ranks)} more ranks"] if len(ranks) < self.size else []
        shown = [self.answers[rank] for rank in finding.ranks if rank in self.answers and self.answers[rank].stack]
        stacks = [f"  rank {answer.rank} is here:\n{answer.stack}" for answer in shown]
        last_seen = [absent.stack for absent in self.absent.values() if absent.stack]
        last_seen = [*last_seen, *stacks][:_MOST_STACKS]
        return "\n".join([f"meshwise: {finding.headline}", *map(self._place, ranks), *more, *last_seen])

    def _lost(self) -> HangFinding | None:
        silent = sorted(rank for rank, absent in self.absent.items() if not absent.finished)
        reported = sorted({answer.lost for answer in self.answers.values() if answer.lost})
        missed = silent if reported else sorted(set(silent).intersection(rank for _, rank in self._waits))
        if missed:
            verb = "does" if len(missed) == 1 else "do"
            return HangFinding(f"{ranks_text(missed)} {verb} not answer", (), certain=True)
        if reported and not self.absent:
            return HangFinding(f"connections broke, but all ranks are alive: {reported[0]}", (), certain=False)
        return None

    def _finished(self) -> HangFinding | None:
        gone = {rank for rank, absent in self.absent.items() if absent.finished}
        waits = [(waiting, rank) for waiting, rank in self._waits if rank in gone]
        if not waits and not any(answer.lost for answer in self.answers.values()):
            return None
        missed = sorted({rank for _, rank in waits} or gone)
        others = tuple(sorted({waiting for waiting, _ in waits}))
        verb = "has" if len(missed) == 1 else "have"
        return HangFinding(f"{ranks_text(missed)} {verb} finished while others wait", others, certain=True)

    def _circle(self) -> HangFinding | None:
        blocked = {rank for rank, answer in self.answers.items() if answer.waiting}
        waits = [(waiting, rank) for waiting, rank in self._waits if waiting in blocked]
        stuck = {waiting for waiting, _ in waits}
        while free := {waiting for waiting, rank in waits if waiting in stuck and rank not in stuck}:
            stuck -= free
        if not stuck:
            return None
        return HangFinding("ranks wait for each other, and none of them can go on", tuple(sorted(stuck)), certain=True)

    def _slow(self) -> HangFinding | None:
        blocked = sorted(rank for rank, answer in self.answers.items() if answer.waiting)
        missed = sorted({rank for _, rank in self._waits}.difference(blocked))
        if missed:
            longest = max(self.answers[waiting].waited for waiting, _ in self._waits)
            headline = f"others have waited {longest:.0f} s for {ranks_text(missed)}"
            return HangFinding(headline, tuple(missed), certain=False)
        blocked = blocked or sorted(rank for rank, answer in self.answers.items() if answer.unfinished)
        if blocked:
            headline = f"the last call of {ranks_text(blocked)} does not end"
            return HangFinding(headline, tuple(blocked), certain=False)
        return None

    @cached_property
    def _waits(self) -> list[tuple[int, int]]:
        """Pairs (waiting rank, other rank) in which the other rank has not made the call that the first waits in."""
        waits: dict[tuple[int, int], None] = {}
        for rank, answer in sorted(self.answers.items()):
            last = answer.recent if answer.waited else ()  # on a GPU, the rank may wait in any of them
            for call in last if answer.waiting is None else [answer.waiting]:
                for other in call.line.ranks:
                    known = self.answers.get(other) or self.absent[other]
                    if other != rank and known.counts.get(call.line, 0) <= call.ordinal:
                        waits[rank, other] = None
        return list(waits)

    def _place(self, rank: int) -> str:
        if rank in self.absent:
            return f"  rank {rank} {self.absent[rank].what}"
        answer = self.answers[rank]
        if answer.lost:
            return f"  rank {rank} ({answer.process}): {answer.lost}"
        missed = [other for waiting, other in self._waits if waiting == rank]
        missing = f" for {ranks_text(missed)}" if missed else ""
        if answer.waiting is None:
            last = f"; its last call was {answer.recent[-1].record}" if answer.recent else ""
            state = f"has called nothing for {answer.waited:.1f} s and may wait{missing}" if missed else "is busy"
            if answer.unfinished is not None:
                state = f"has called nothing for {answer.waited:.1f} s; its GPU has not passed {answer.unfinished}"
            return f"  rank {rank} ({answer.process}) {state}{last}"
        return f"  rank {rank} ({answer.process}) has waited {answer.waited:.1f} s{missing} in {answer.waiting.record}"


@dataclass(frozen=True)
class _Pace:
    """Times of a watchdog, in seconds. beat: between two beats. suspect: how long a rank waits before it starts a
    survey. silent: how long a survey waits for answers. stall: how long a rank may wait before the job ends."""

    beat: float
    suspect: float
    silent: float
    stall: float

    @classmethod
    def of(cls, stall: float, *, size: int) -> "_Pace":
        beat = max(min(1.0, stall / 20), size / _RANKS_PER_BEAT)
        return cls(beat, max(3 * beat, min(10.0, stall / 5)), max(6 * beat, min(30.0, stall / 3)), stall)


ReportSink: TypeAlias = Callable[[str], object]
"""Function that receives the report with which the job ends."""


def report_to_stderr(report: str) -> None:
    """Print a report to standard error."""
    sys.stderr.write(f"{report}\n")


class Watchdog:
    """Thread that watches over one rank, started by `start`. Every rank of the job has one, over the same store.

    | sink       receiver of the final report, called on the one rank that reports; warnings go to stderr
    | launcher   process that started this rank: when it ends, this rank ends; None to watch no launcher

    Raises ValueError for a wrong MESHWISE_STALL_SECONDS."""

    def __init__(
        self,
        world: World,
        *,
        store: c10d.Store,
        sink: ReportSink = report_to_stderr,
        launcher: LauncherProcess | None = None,
    ) -> None:
        self._pace = _Pace.of(stall_seconds_from_environment(), size=world.size)
        self._store = c10d.PrefixStore("meshwise/watch", store.clone())  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self._world = world
        self._sink = sink
        self._launcher = launcher
        self._process = f"process {os.getpid()} on {socket.gethostname()}"
        self._main = threading.get_ident()
        self._answered = 0
        self._asked = 0.0
        self._lost = ""
        self._wake = threading.Event()
        self._stopped = False
        self._ending = threading.RLock()  # the main thread and the watchdog's thread may both end the rank
        self._previous_hook = sys.excepthook
        self._thread = threading.Thread(target=self._run, name="meshwise watch", daemon=True)

    def start(self) -> None:
        """Start the thread. From now on an uncaught exception in the main thread ends all ranks."""
        self._store.set(f"process/{self._world.rank}", self._process)
        self._previous_hook, sys.excepthook = sys.excepthook, self._excepthook
        os.register_at_fork(after_in_child=self._leave_to_the_rank)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and tell the other ranks that this rank has finished. A second call does nothing."""
        if self._stopped:
            return
        self._leave_to_the_rank()
        self._wake.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError):  # the store may be gone before the last rank has finished
            counts = pickle.dumps(self._world.flight_recorder.counts)
            self._store.set(f"finished/{self._world.rank}", counts)  # type: ignore[arg-type]
            self._store.add("finished", 1)

    def _leave_to_the_rank(self) -> None:
        """Stop watching in a fork of the rank's process, which is no rank."""
        self._stopped = True
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_hook

    def failed(self, error: BaseException) -> NoReturn:
        """Report `error` with its traceback, and end all ranks. Call this method in the main thread; it never returns.
        After a RankLostError, first wait for a survey, because other ranks may know the cause."""
        if isinstance(error, RankLostError):
            self._lost = str(error)
            self._wake.set()
            time.sleep(2 * self._pace.silent)
        trace = "".join(traceback.format_exception(error)).rstrip()
        world = self._world
        self._declare(world.rank, f"meshwise: rank {world.rank} of {world.size} ({self._process}) failed:\n{trace}")

    def end_if_declared(self) -> None:
        """End this rank if the end of the job was declared, or if the store was lost because its rank ended early."""
        try:
            if self._store.check(["end"]):
                self._end()
        except RuntimeError:
            self._leave(f"meshwise: rank {self._world.rank} ends: the job's store is gone")

    def _excepthook(self, kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            self._previous_hook(kind, error, at)
        else:
            self.failed(error)

    # ---- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._beat()
                waited = min(self._waited(), time.monotonic() - self._asked)
                if not self._stopped and (self._lost or waited >= self._pace.suspect):
                    self._ask()
                self._pause()
        except RuntimeError as error:  # what the store raises when it does not answer
            self._without_store(str(error).splitlines()[0])

    def _pause(self) -> None:
        self._wake.wait(self._pace.beat)
        if not self._stopped:
            self._wake.clear()

    def _beat(self) -> None:
        """Store that this rank is alive, answer a new survey, and end the rank if the end has been declared."""
        self._require_launcher()
        place = "\n".join(self._stacks())
        self._store.set(f"alive/{self._world.rank}", pickle.dumps((time.time(), place)))  # type: ignore[arg-type]
        if self._store.check(["end"]):
            self._end()
        number = self._store.add("asked", 0)
        if number > self._answered:
            self._answered = number
            self._store.set(f"answer/{self._world.rank}", pickle.dumps((number, self._answer())))  # type: ignore[arg-type]
            self._store.add(f"answers/{number}", 1)
            self._asked = time.monotonic()

    def _waited(self) -> float:
        """Return the seconds for which this rank has waited, or 0; on a GPU, the seconds since its last call."""
        flight_recorder = self._world.flight_recorder
        since = flight_recorder.position.waiting_since
        if since is None and self._world.device.type == "cuda" and flight_recorder.calls:
            since = flight_recorder.called_at
        return 0.0 if since is None else time.monotonic() - since

    def _answer(self) -> RankAnswer:
        flight_recorder = self._world.flight_recorder
        position, recent = flight_recorder.position, flight_recorder.recent.copy()
        waited = self._waited()
        if waited < self._pace.suspect / 2:
            waited = 0.0  # a short wait may be over when the other ranks answer
        waiting: PlacedCall | None = None
        if waited and position.waiting_since is not None:
            waiting = next((call for call in recent if call.record is position.record), None)
        return RankAnswer(
            rank=self._world.rank,
            process=self._process,
            waiting=waiting,
            waited=waited,
            recent=list(recent)[-_CALLS_SENT:],
            counts=dict(flight_recorder.counts),
            stack="\n".join(self._stacks()),
            lost=self._lost,
            unfinished=self._world.oldest_running_call if waited else None,
        )

    def _stacks(self) -> list[str]:
        """Return the stacks of the main thread, and of the thread that made the last call or began the activity."""
        stacks = [stack_of(thread) for thread in dict.fromkeys((self._main, self._world.flight_recorder.thread))]
        return [stack for stack in stacks if stack]

    # ---- the rank that starts a survey -------------------------------------------------------------------------

    def _ask(self) -> None:
        """Survey all ranks, and declare the end when waiting is in vain or took too long."""
        survey = self._survey(self._store.add("asked", 1))
        finding = survey.finding() if survey else None
        if survey is None or finding is None:
            return
        longest = max(answer.waited for answer in survey.answers.values())
        report = survey.report(finding)
        if finding.certain or longest >= self._pace.stall:
            self._declare(min(survey.answers), report)
        if longest >= self._pace.stall / 2 and self._store.add("warned", 1) == 1:
            left = self._pace.stall - longest
            report_to_stderr(f"{report}\n  the job goes on for {left:.0f} s more ({_VARIABLE}={self._pace.stall:g})")

    def _survey(self, number: int) -> RankSurvey | None:
        """Return the answers of all ranks to survey `number`, or None when this rank finishes meanwhile. Waits for
        answers up to `silent` seconds; if a connection of this rank broke, up to six beats."""
        patience = min(self._pace.silent, 6 * self._pace.beat) if self._lost else self._pace.silent
        ends = time.monotonic() + patience
        while not self._stopped:
            self._beat()
            known = self._store.add(f"answers/{number}", 0) + self._store.add("finished", 0)
            late = time.monotonic() >= ends
            if known >= self._world.size or late:
                survey = self._collect(number)
                if late or all(absent.finished for absent in survey.absent.values()):
                    return survey
            self._pause()
        return None

    def _collect(self, number: int) -> RankSurvey:
        answers: dict[int, RankAnswer] = {}
        size = self._world.size
        for rank in range(size):
            if self._store.check([f"answer/{rank}"]):
                answered, answer = pickle.loads(self._store.get(f"answer/{rank}"))
                if answered >= number:
                    answers[rank] = answer
        return RankSurvey(size, answers, {rank: self._absent(rank) for rank in range(size) if rank not in answers})

    def _absent(self, rank: int) -> AbsentRank:
        if self._store.check([f"finished/{rank}"]):
            counts = pickle.loads(self._store.get(f"finished/{rank}"))
            return AbsentRank("has finished", finished=True, counts=counts)
        if not self._store.check([f"process/{rank}"]):
            return AbsentRank("never came")
        process = self._store.get(f"process/{rank}").decode()
        if not self._store.check([f"alive/{rank}"]):
            return AbsentRank(f"({process}) does not answer, and never did{_state(process)}")
        seen, place = pickle.loads(self._store.get(f"alive/{rank}"))
        age = f"{time.time() - seen:.1f} s"
        return AbsentRank(
            f"({process}) does not answer; its last sign of life is {age} old{_state(process)}",
            stack=f"  {age} ago rank {rank} was here:\n{place}" if place else "",
        )

    # ---- the end -----------------------------------------------------------------------------------------------

    def _declare(self, reporter: int, report: str) -> NoReturn:
        """Declare the end of the job, unless it was declared before; end this rank. `reporter` prints the report."""
        try:
            if self._store.add("declared", 1) == 1:
                self._store.set("end", pickle.dumps((reporter, report)))  # type: ignore[arg-type]
            self._end()
        except RuntimeError:
            self._leave(report)

    def _end(self) -> NoReturn:
        """End this rank after the end was declared: one rank prints the report, the other ranks wait for it."""
        with self._ending:
            reporter, report = pickle.loads(self._store.get("end"))
            if reporter == self._world.rank:
                self._sink(report)
                self._store.set("reported", "")
            else:
                with contextlib.suppress(RuntimeError):  # the reporter may have died
                    self._store.wait(["reported"], timedelta(seconds=8 * self._pace.beat))
            self._leave()

    def _require_launcher(self) -> None:
        if self._launcher is not None and self._launcher.is_gone():
            self._leave(f"meshwise: rank {self._world.rank} ends: its launcher ({self._launcher}) is gone")

    def _without_store(self, why: str) -> None:
        """Watch this rank without the store: end it when it waits in a collective, but not while it computes."""
        while not self._stopped:
            self._require_launcher()
            since = self._world.flight_recorder.position.waiting_since
            if self._lost or (since is not None and time.monotonic() - since >= self._pace.suspect):
                rank, record = self._world.rank, self._world.flight_recorder.position.record
                self._leave(f"meshwise: rank {rank} ends: the job's store is gone ({why}), waiting in {record}")
            self._pause()

    def _leave(self, report: str | None = None) -> NoReturn:
        """End this process at once with exit status 1. Flushing the output gets 2 s: a pipe may be full."""
        if report is not None:
            self._sink(report)
        flushing = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
        flushing.start()
        flushing.join(2.0)
        os._exit(1)


def _state(process: str) -> str:
    """Return the state of a process as a clause of a report; "" on another machine. process: `process PID on HOST`."""
    _, pid, _, host = process.split(maxsplit=3)
    if host != socket.gethostname():
        return ""
    return "; the process has ended" if has_ended(int(pid)) else "; the process is stopped or stuck"


def stall_seconds_from_environment() -> float:
    """Return the value of MESHWISE_STALL_SECONDS, or 300 without it. Raises ValueError unless it is above 0."""
    text = os.environ.get(_VARIABLE, str(STALL_SECONDS))
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise ValueError(f"{_VARIABLE}={text}: it has to be a number of seconds above 0; {STALL_SECONDS:.0f} by default")

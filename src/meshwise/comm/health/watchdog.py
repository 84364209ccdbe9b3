"""Watch over a rank with a thread, and end a job that hangs with one report.

The thread of each rank reads the rank's flight recorder. The threads exchange messages through the job's store, which
works when collectives do not. They need no help from the main thread, which may be blocked for good in C++.

    | event                                 action of the watchdog
    | every beat (about 1 s)                store that this rank lives; answer a new survey; look for the declared end
    | the rank waits for 10 s               start a survey: every rank answers with its position, last calls and stack
    | waiting is certainly in vain          the lowest rank that answered prints the report, and all ranks end
    | a rank may only be slow               print one warning at half of `stall_seconds`, end at `stall_seconds`
    | an exception ends the main thread     its traceback is the report, and all ranks end
    | the launcher is gone                  end this rank alone
    | the store is gone                     end this rank alone when it waits

Times are for `stall_seconds` = 300. Ranks that disagree, finished early or wait in a circle are reported after 10 s of
waiting. A rank that does not answer is reported 30 s later, or 6 s later when its connection broke."""

import contextlib
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import NoReturn, TypeAlias

from torch.distributed import distributed_c10d as c10d

from meshwise.comm.api.flight_recorder import PlacedCall
from meshwise.comm.api.process_life import LauncherProcess, has_ended
from meshwise.comm.api.python_stacks import stack_of
from meshwise.comm.api.rank_lost import RankLostError
from meshwise.comm.api.world import World
from meshwise.comm.health.rank_survey import AbsentRank, RankAnswer, RankSurvey

STALL_SECONDS = 300.0
"""Default for how long a rank may wait in one collective, in seconds."""

_VARIABLE = "MESHWISE_STALL_SECONDS"
_CALLS_SENT = 64
_RANKS_PER_BEAT = 500
_STORE_SECONDS = 20
_FLUSH_SECONDS = 2.0


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

    | stall_seconds   how long a rank may wait in one collective while the other ranks live; None for the value of
    |                 MESHWISE_STALL_SECONDS, or 300 without this environment variable
    | sink            receiver of the final report, called on the one rank that reports; warnings go to stderr
    | launcher        process that started this rank: when it ends, this rank ends; None to watch no launcher

    Raises ValueError unless stall_seconds is positive."""

    def __init__(
        self,
        world: World,
        *,
        store: c10d.Store,
        stall_seconds: float | None = None,
        sink: ReportSink = report_to_stderr,
        launcher: LauncherProcess | None = None,
    ) -> None:
        stall = stall_seconds_from_environment() if stall_seconds is None else stall_seconds
        if not stall > 0:
            raise ValueError(f"stall_seconds is {stall}; it has to be positive")
        self._pace = _Pace.of(stall, size=world.size)
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
        self._stopped = True
        self._wake.set()
        self._thread.join()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_hook
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
        """Report `error`, and end all ranks. Call it in the main thread; it does not return. The report is the
        traceback. After a RankLostError it first waits for a survey, because other ranks may know the cause."""
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
                if not self._stopped and (self._lost or self._suspects()):
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

    def _suspects(self) -> bool:
        rested = time.monotonic() - self._asked
        return self._waited() >= self._pace.suspect and rested >= self._pace.suspect

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
            unfinished=self._world.unfinished if waited else None,
        )

    def _stacks(self) -> list[str]:
        """Return the stacks of the main thread and of the thread that made the last call."""
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
            since = self._world.position.waiting_since
            if self._lost or (since is not None and time.monotonic() - since >= self._pace.suspect):
                record = self._world.position.record
                self._leave(
                    f"meshwise: rank {self._world.rank} ends: the job's store is gone ({why}), waiting in {record}"
                )
            self._pause()

    def _leave(self, report: str | None = None) -> NoReturn:
        """End this process at once with exit status 1. Flushing the output gets 2 s: a pipe may be full."""
        if report is not None:
            self._sink(report)
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
        os._exit(1)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


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

"""Find out why ranks wait, from the answers of all ranks to a survey by the watchdog.

One waiting rank does not show the cause: another rank may just compile, load data or write a checkpoint. So the
answers of all ranks are compared. The causes are tried in this order:

    | disagreement      ranks made different calls where they have to make the same call
    | lost rank         a rank does not answer: it was stopped or killed, or its machine failed
    | finished rank     a rank has finished, and other ranks wait for it
    | circle            ranks wait for each other in a circle
    | slow rank         a rank answers, and computes: waiting may help

In the last case waiting may help. In every other case the cause is certain, and waiting longer cannot help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshwise.comm.api.flight_recorder import CallLine, CallRecord, PlacedCall, first_difference, ranks_text

_MOST_LINES = 16
_MOST_STACKS = 4


@dataclass(frozen=True)
class RankAnswer:
    """Answer of one rank to a survey.

    | process   `process PID on HOST`
    | waiting   call in which the rank is blocked; None if it is not blocked, and on a GPU, where no wait blocks it
    | waited    seconds in that call; on a GPU, seconds since the last call; 0 if the rank does not wait
    | recent    last calls of the rank, oldest first; on a GPU any of these calls may be the one that does not complete
    | counts    number of calls so far on each line (`CallLine`)
    | stack     Python stacks of the rank as text
    | lost      message of the RankLostError that the rank raised; "" if none
    | unfinished   on a GPU, the oldest call that the host has passed and the GPU has not; None if there is none"""

    rank: int
    process: str
    waiting: PlacedCall | None
    waited: float
    recent: Sequence[PlacedCall]
    counts: Mapping[CallLine, int]
    stack: str
    lost: str = ""
    unfinished: CallRecord | None = None

    def pending(self) -> Sequence[PlacedCall]:
        """Return the calls in which this rank may be waiting."""
        if self.waiting is not None:
            return [self.waiting]
        return self.recent if self.waited else []


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
        return self._disagreement() or self._lost() or self._finished() or self._circle() or self._slow()

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

    def _disagreement(self) -> HangFinding | None:
        difference = first_difference({rank: answer.recent for rank, answer in self.answers.items()})
        return difference and HangFinding(*difference, certain=True)

    def _lost(self) -> HangFinding | None:
        silent = sorted(rank for rank, absent in self.absent.items() if not absent.finished)
        reported = sorted({answer.lost for answer in self.answers.values() if answer.lost})
        missed = silent if reported else sorted(set(silent).intersection(rank for _, rank in self._waits))
        if missed:
            return HangFinding(f"{ranks_text(missed)} {_verb(missed, 'does', 'do')} not answer", (), certain=True)
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
        headline = f"{ranks_text(missed)} {_verb(missed, 'has', 'have')} finished while others wait"
        return HangFinding(headline, others, certain=True)

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
            return HangFinding(
                f"others have waited {longest:.0f} s for {ranks_text(missed)}", tuple(missed), certain=False
            )
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
            for call in answer.pending():
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


def _verb(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many

"""Find out why the ranks stand still, from the answers of all ranks.

A rank that waits is no proof of anything: another may compile, load data or write a checkpoint. So the answers of all
ranks are put together and the reason is looked for in this order:

    | they disagree     calls with equal places (the same line, the same ordinal) that differ
    | one is lost       it does not answer: stopped, killed, or its machine is gone
    | one has finished  and the others wait for it
    | a circle          every rank that somebody waits for waits itself
    | one is slow       it answers and it is busy: no reason to end anything yet

All but the last are certain: waiting longer cannot help.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshwise.comm.api.flight_recorder import CallLine, PlacedCall, first_difference, ranks_text

_MOST_LINES = 16
_MOST_STACKS = 4


@dataclass(frozen=True)
class RankAnswer:
    """Answer of a rank about itself.

    `waiting`: the call that it has been blocked in for `waited` seconds. On a GPU waiting does not block: then it is
    None, and `waited` is the time since the last call. Any recent call may be the one that does not end.
    """

    rank: int
    process: str
    waiting: PlacedCall | None
    waited: float
    recent: Sequence[PlacedCall]
    counts: Mapping[CallLine, int]
    stack: str
    lost: str = ""

    def pending(self) -> Sequence[PlacedCall]:
        """Return the calls that this rank may be waiting in."""
        if self.waiting is not None:
            return [self.waiting]
        return self.recent if self.waited else []


@dataclass(frozen=True)
class AbsentRank:
    """A rank that did not answer, and what is known of it: its counts if it has finished, else its last stack."""

    what: str
    finished: bool = False
    stack: str = ""
    counts: Mapping[CallLine, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HangFinding:
    """Why the ranks stand still: a headline, the ranks whose stacks are shown, and whether waiting cannot help."""

    headline: str
    ranks: tuple[int, ...]
    certain: bool


@dataclass(frozen=True)
class RankSurvey:
    """The answers of all ranks that gave one, and what is known of those that did not."""

    size: int
    answers: Mapping[int, RankAnswer]
    absent: Mapping[int, AbsentRank]

    def finding(self) -> HangFinding | None:
        """Return the reason why ranks wait, or None if none does."""
        return self._disagreement() or self._lost() or self._finished() or self._circle() or self._slow()

    def report(self, finding: HangFinding) -> str:
        """Return the report: the finding, the position of each rank, and the stacks that matter."""
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
            return HangFinding(f"ranks have lost each other though all are alive: {reported[0]}", (), certain=False)
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
        if blocked:
            headline = f"what {ranks_text(blocked)} {_verb(blocked, 'has', 'have')} called does not end"
            return HangFinding(headline, tuple(blocked), certain=False)
        return None

    @cached_property
    def _waits(self) -> list[tuple[int, int]]:
        """Pairs (waiting rank, rank waited for), for every rank that has not reached the call that another one waits
        in.
        """
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
            return f"  rank {rank} ({answer.process}) {state}{last}"
        return f"  rank {rank} ({answer.process}) has waited {answer.waited:.1f} s{missing} in {answer.waiting.record}"


def _verb(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many

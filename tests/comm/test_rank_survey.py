"""Test the diagnosis of why ranks wait, on drawn answers of the ranks.

"AB.C"   the calls of a rank, in order, among all ranks; a dot: the rank is blocked in the call before the dot"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshwise.comm.api.flight_recorder import CallLine, CallRecord, PlacedCall
from meshwise.comm.health.watchdog import AbsentRank, HangFinding, RankAnswer, RankSurvey

KINDS = {"A": "all_reduce", "B": "broadcast", "G": "all_gather"}


def answer(rank: int, calls: str, *, size: int, on_gpu: bool = False, lost: str = "") -> RankAnswer:
    line = CallLine(tuple(range(size)))
    made = calls.removesuffix(".")
    recent = [
        PlacedCall(
            CallRecord(ordinal, KINDS[kind], ("rank",), (8,), "float32", 32, f"train.py:{ordinal} step"), line, ordinal
        )
        for ordinal, kind in enumerate(made)
    ]
    blocked = made != calls
    return RankAnswer(
        rank=rank,
        process=f"process {rank} on here",
        waiting=recent[-1] if blocked and not on_gpu else None,
        waited=12.0 if blocked or on_gpu else 0.0,
        recent=recent,
        counts={line: len(made)},
        stack=f"      the stack of rank {rank}",
        lost=lost,
    )


def survey(*calls: str | AbsentRank, on_gpu: bool = False) -> RankSurvey:
    size = len(calls)
    answers = {
        rank: answer(rank, drawn, size=size, on_gpu=on_gpu)
        for rank, drawn in enumerate(calls)
        if isinstance(drawn, str)
    }
    return RankSurvey(size, answers, {rank: drawn for rank, drawn in enumerate(calls) if isinstance(drawn, AbsentRank)})


def found(looked: RankSurvey) -> HangFinding:
    finding = looked.finding()
    assert finding is not None
    return finding


def test_a_call_that_no_gpu_passes_is_reported() -> None:
    """All ranks have made the same calls, their hosts wait for numbers, and NCCL does not end."""
    silent = survey("AB", "AB", on_gpu=True)
    assert silent.finding() is None, "they may compute"
    hanging = replace(
        silent,
        answers={rank: replace(one, unfinished=one.recent[0].record) for rank, one in silent.answers.items()},
    )
    finding = found(hanging)
    assert finding.headline == "the last call of ranks 0,1 does not end"
    assert not finding.certain
    assert "its GPU has not passed #0 all_reduce[rank] 8 float32 at train.py:0 step" in hanging.report(finding)


SILENT = AbsentRank("(process 7 on there) does not answer")
LEFT = AbsentRank("has finished", finished=True, counts={CallLine((0, 1, 2)): 1})


@pytest.mark.parametrize(
    "calls, headline, certain",
    [
        (("AB.", "AA.", "AB."), "ranks 0,1,2 called different collectives", True),
        (("AB.", "AGB.", "AB."), "ranks 0,1,2 called different collectives", True),
        (("AB.", SILENT, "AB."), "rank 1 does not answer", True),
        (("AB.", LEFT, "AB."), "rank 1 has finished while others wait", True),
        (("AB.", "A", "AB."), "others have waited 12 s for rank 1", False),
        (("AB.", "AB.", "AB."), "the last call of ranks 0,1,2 does not end", False),
    ],
)
def test_the_reason_is_found(calls: Sequence[str | AbsentRank], headline: str, certain: bool) -> None:
    finding = found(survey(*calls))
    assert finding.headline.startswith(headline)
    assert finding.certain == certain


@pytest.mark.parametrize("calls", [("AB", "A", "AB"), ("A", SILENT, "A"), ("", "", ""), ("A.", LEFT, "A.")])
def test_nothing_certain_is_found_while_nobody_waits_in_vain(calls: Sequence[str | AbsentRank]) -> None:
    finding = survey(*calls).finding()
    assert finding is None or not finding.certain


def test_a_rank_that_is_behind_on_a_gpu_is_found_though_nobody_blocks() -> None:
    finding = found(survey("ABG", "A", "ABG", on_gpu=True))
    assert finding.headline == "others have waited 12 s for rank 1"
    assert finding.ranks == (1,)


def test_equal_ranks_on_a_gpu_that_only_compute_are_left_alone() -> None:
    assert survey("ABG", "ABG", "ABG", on_gpu=True).finding() is None


def test_ranks_on_a_gpu_that_wait_crosswise_are_no_circle_because_they_may_still_call() -> None:
    line, other = CallLine((0, 1)), CallLine((1, 0))
    answers = {}
    for rank, own in enumerate((line, other)):
        made = answer(rank, "A", size=2, on_gpu=True)
        call = PlacedCall(made.recent[0].record, own, 0)
        answers[rank] = RankAnswer(rank, made.process, None, 12.0, [call], {own: 1}, "")
    assert not found(RankSurvey(2, answers, {})).certain


def test_a_broken_connection_to_a_silent_rank_is_certain_though_nobody_waits() -> None:
    answers = {0: answer(0, "A", size=2, lost="rank 1 was lost")}
    finding = found(RankSurvey(2, answers, {1: SILENT}))
    assert finding.headline == "rank 1 does not answer"
    assert finding.certain


def test_a_report_shows_every_rank_and_the_stacks_that_matter() -> None:
    looked = survey("AB.", "A", "AB.")
    assert looked.report(found(looked)).splitlines() == [
        "meshwise: others have waited 12 s for rank 1",
        "  rank 0 (process 0 on here) has waited 12.0 s for rank 1 in #1 broadcast[rank] 8 float32 at train.py:1 step",
        "  rank 1 (process 1 on here) is busy; its last call was #0 all_reduce[rank] 8 float32 at train.py:0 step",
        "  rank 2 (process 2 on here) has waited 12.0 s for rank 1 in #1 broadcast[rank] 8 float32 at train.py:1 step",
        "  rank 1 is here:",
        "      the stack of rank 1",
    ]


def test_a_report_of_many_ranks_begins_with_those_that_are_missed() -> None:
    looked = survey(*["AB."] * 60, "A", *["AB."] * 3)
    lines = looked.report(found(looked)).splitlines()
    assert lines[1].startswith("  rank 60 (process 60 on here) is busy")
    assert "  … and 48 more ranks" in lines
    assert len(lines) < 25

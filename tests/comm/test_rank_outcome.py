"""Test the outcome that a rank leaves, even if its exception or result cannot be pickled."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from meshwise.comm.api.flight_recorder import RanksDisagree
from meshwise.comm.api.launcher_info import RankLostError
from meshwise.comm.launch.rank_process import RankOutcome, first_error, results


class Refused(Exception):
    """Cannot be made again from its arguments alone, as pickle does."""

    def __init__(self, value: int, *, reason: str) -> None:
        super().__init__(f"{value}: {reason}")


class Wordy(Exception):
    """Is made again without complaint, and says something else then."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__(f"the reasons are {' and '.join(reasons)}")


def raised(error: BaseException) -> RankOutcome:
    try:
        raise error
    except type(error) as caught:
        return RankOutcome.of(caught)


def test_a_result_comes_back(tmp_path: Path) -> None:
    RankOutcome({"loss": 2.5}).save(tmp_path, rank=3)
    assert RankOutcome.load(tmp_path, rank=3) == RankOutcome({"loss": 2.5})
    assert RankOutcome.load(tmp_path, rank=0) is None


def test_an_exception_comes_back_as_itself_with_its_traceback(tmp_path: Path) -> None:
    raised(ZeroDivisionError("here")).save(tmp_path, rank=0)
    outcome = RankOutcome.load(tmp_path, rank=0)
    assert outcome is not None
    assert type(outcome.error) is ZeroDivisionError
    assert outcome.trace.rstrip().endswith("raise error"), "the words are the error's to say"
    assert not outcome.is_consequence
    assert raised(RankLostError("rank 1 was lost")).is_consequence


def test_a_consequence_does_not_replace_an_earlier_report(tmp_path: Path) -> None:
    RankOutcome(error=RanksDisagree("who waits for whom")).save(tmp_path, rank=0)
    raised(RankLostError("rank 1 was lost")).save(tmp_path, rank=0)
    assert str(first_error(tmp_path, size=2, statuses={1: 1})) == "who waits for whom"


def test_an_exception_that_cannot_travel_keeps_its_words(tmp_path: Path) -> None:
    raised(Refused(4, reason="no")).save(tmp_path, rank=0)
    outcome = RankOutcome.load(tmp_path, rank=0)
    assert outcome is not None
    assert repr(outcome.error) == "RuntimeError('Refused: 4: no')"


def test_an_exception_that_would_change_its_words_keeps_them(tmp_path: Path) -> None:
    raised(Wordy(["wind", "rain"])).save(tmp_path, rank=0)
    outcome = RankOutcome.load(tmp_path, rank=0)
    assert outcome is not None
    assert repr(outcome.error) == "RuntimeError('Wordy: the reasons are wind and rain')"


def test_a_result_that_cannot_travel_is_an_error_of_the_rank(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        RankOutcome(threading.Lock()).save(tmp_path, rank=0)
    assert RankOutcome.load(tmp_path, rank=0) is None


def test_a_rank_that_left_hides_no_error_of_another(tmp_path: Path) -> None:
    """It can be the first to go: the other fails when all have done their work, with a result that cannot travel."""
    raised(SystemExit()).save(tmp_path, rank=0)
    raised(Refused(4, reason="no")).save(tmp_path, rank=1)
    assert str(first_error(tmp_path, size=2, statuses={1: 1})) == "Refused: 4: no"


def test_a_rank_that_left_hides_no_rank_that_was_killed(tmp_path: Path) -> None:
    raised(SystemExit()).save(tmp_path, rank=0)
    assert str(first_error(tmp_path, size=2, statuses={1: -11})).endswith("without an exception, killed by SIGSEGV")
    assert str(first_error(tmp_path, size=2, statuses={1: -35})).endswith("without an exception, killed by signal 35")


def test_ranks_that_left_have_no_results(tmp_path: Path) -> None:
    for rank in range(2):
        raised(SystemExit()).save(tmp_path, rank=rank)
    with pytest.raises(SystemExit):
        results(tmp_path, size=2)
    RankOutcome(5).save(tmp_path, rank=1)
    with pytest.raises(RankLostError, match=r"rank 0 of 2 left by sys\.exit, but other ranks did not"):
        results(tmp_path, size=2)

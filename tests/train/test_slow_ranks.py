"""A rank that the others wait for is named, with its steps."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from meshwise.comm.api import flight_recorder
from meshwise.comm.api.world import World
from meshwise.testing import run
from meshwise.train import loop as pace
from meshwise.train.loop import WINDOW, RankPace, slow_ranks
from meshwise.train.run_events import Slow


class Clocks:
    """One for each rank. It stands while the rank computes and is moved by hand; who waits is as late as the latest."""

    def __init__(self) -> None:
        self._now: dict[int, float] = {}

    def passes(self, seconds: float) -> None:
        self._now[threading.get_ident()] = self.monotonic() + seconds

    def monotonic(self) -> float:
        me = threading.get_ident()
        if sys._getframe(1).f_code is flight_recorder._Waiting.__exit__.__code__:
            self._now[me] = max([*self._now.values()])
        return self._now.setdefault(me, 0.0)


def test_the_rank_that_sleeps_is_slow_and_those_that_wait_for_it_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks()
    for module in (pace, flight_recorder):
        monkeypatch.setattr(module, "time", clocks)

    def main(world: World) -> list[Slow]:
        pace = RankPace(world)
        for step in range(1, 4):
            with pace.timed(step):
                clocks.passes(0.2 if (world.rank, step) == (1, 2) else 0.01)
                world.all_reduce(torch.ones(1), axes="rank").wait()
            assert not pace.slow()
        return pace.slow(after=1)

    for found in run(3, main):
        [slow] = found
        assert (slow.rank, slow.steps, slow.step) == (1, [2], 3)
        assert (slow.seconds, slow.others) == pytest.approx((0.2, 0.01))


def test_the_margin_is_twofold_and_fifty_milliseconds() -> None:
    times = [
        [0.010, 0.100, 0.100, 0.210, 0.500],
        [0.040, 0.100, 0.190, 0.100, 0.100],
        [0.010, 0.100, 0.100, 0.100, 0.400],
    ]
    found = list(slow_ranks([7, 8, 9, 10, 11], times=times))
    assert [(slow.rank, slow.steps) for slow in found] == [(0, [10])], "of two slow ones neither kept all waiting"


def test_it_looks_once_a_window_and_never_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks()
    monkeypatch.setattr(pace, "time", clocks)

    def main(world: World) -> list[int]:
        pace = RankPace(world)
        found: list[int] = []
        for step in range(2 * WINDOW):
            with pace.timed(step):
                clocks.passes(float(world.rank == 0))
            found += [step] * bool(pace.slow())
        return found

    assert run(2, main) == [[WINDOW - 1, 2 * WINDOW - 1]] * 2
    assert run(1, main) == [[]]

"""Test waits for another rank of the host, and their cost for this other rank."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from meshwise.comm.api.flight_recorder import CallRecord
from meshwise.comm.shared_memory.host_connection import HostConnection, HostPeer, Progress

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")

STAMP = CallRecord(0, "barrier", ("rank",), (), "", 0, "here")


class Rung:
    """The board of a rank whose bell rings for others, `rings` times in all, whenever somebody looks twice at it."""

    def __init__(self, rings: int) -> None:
        self.bell, self.rings, self.slept = 0, rings, 0

    def ring(self) -> None:
        """For somebody else."""
        if self.bell < self.rings:
            self.bell += 1

    def sleep(self, _seen: int, *, seconds: float) -> None:
        """Until it rings."""
        assert seconds > 0
        self.slept += 1
        self.ring()


def waited(board: Rung, *, rounds: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How often a rank slept on that bell, so that whoever rings has to wake it, and how often it dozed instead."""
    dozed: list[float] = []

    def doze(seconds: float) -> None:
        dozed.append(seconds)
        board.ring()

    monkeypatch.setattr("meshwise.comm.shared_memory.host_connection.time", SimpleNamespace(sleep=doze))
    peers: Any = [HostPeer(1, os.getpid(), board, mock.Mock())]  # type: ignore[arg-type] # as much of one as is used
    host = HostConnection(0, board=mock.Mock(), peers=peers)
    left = iter(range(40 + rounds))  # those before are the looks and yields
    host.wait_for(
        1, condition=lambda: next(left, None) is None, among=(0, 1), about=STAMP, meanwhile=lambda: Progress.NOTHING
    )
    host.leave()
    return board.slept, len(dozed)


def test_a_rank_that_is_woken_in_vain_lets_the_one_who_rings_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited(Rung(10**9), rounds=1000, monkeypatch=monkeypatch) == (16, 984)


def test_one_who_seldom_rings_is_slept_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited(Rung(10), rounds=15, monkeypatch=monkeypatch) == (15, 0)


def test_when_it_has_stopped_to_ring_it_is_slept_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, dozed = waited(Rung(100), rounds=1000, monkeypatch=monkeypatch)
    assert dozed == 100 - 16 + 1
    assert slept == 1000 - dozed

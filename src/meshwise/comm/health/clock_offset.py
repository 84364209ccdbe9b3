"""Measure how far the clocks of the ranks differ, by messages."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import World

_ROUNDS = 8


def clock_offset(world: World, *, now: Callable[[], float] = time.monotonic) -> float:
    """Return how far this rank's clock is ahead of the first rank's, in seconds; 0 within the measurement error.

    The first rank asks every other one for the time and takes the quickest answer: the clock was read somewhere between
    question and answer (Cristian, 1989). Every rank calls it.
    """
    line = world.over(Mesh((("rank", world.size),)))
    offsets = [0.0] * world.size
    for rank in range(1, world.size):
        if world.rank == 0:
            offsets[rank] = min((_asked(line, rank, now) for _ in range(_ROUNDS)), key=lambda answer: answer[1])[0]
        elif world.rank == rank:
            for _ in range(_ROUNDS):
                _answer(line, now)
    told: list[float] = world.exchange(offsets)[0]
    return told[world.rank]


def _asked(line: World, rank: int, now: Callable[[], float]) -> tuple[float, float]:
    """Return how far the clock of `rank` is ahead, and the seconds that the question took."""
    told = torch.zeros(1, dtype=torch.float64, device=line.device)
    asked = now()
    line.send(told, axis="rank", to=rank).wait()
    line.recv(told, axis="rank", source=rank).wait()
    there, answered = told.item(), now()
    within = asked <= there <= answered
    return 0.0 if within else there - (asked + answered) / 2, answered - asked


def _answer(line: World, now: Callable[[], float]) -> None:
    told = torch.zeros(1, dtype=torch.float64, device=line.device)
    line.recv(told, axis="rank", source=0).wait()
    told.item()  # on a GPU the wait does not hold up the host
    told.fill_(now())
    line.send(told, axis="rank", to=0).wait()

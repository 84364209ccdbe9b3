"""Test a rank that a signal interrupts in a collective and that then waits for the collective again."""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Iterator
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not in torch's stubs

from joined_worlds import joined
from meshwise.comm.api.split_and_reduce import copy, reduce_block
from meshwise.comm.api.world import World
from meshwise.comm.network.gloo_world import PendingMessages
from meshwise.comm.network.job_store import job_store
from meshwise.testing import run
from warm_processes import Processes

pytestmark = pytest.mark.processes

SIZE = 3


class Interruption(Exception):
    """What the handler of the signal raises."""


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise Interruption


@contextlib.contextmanager
def _signalled_after(place: str, job: Any) -> Iterator[None]:
    """Send this process a signal when `job`, which is found at `place`, has been done for the first time."""
    sent = False

    def done(*args: Any, **options: Any) -> Any:
        nonlocal sent
        result = job(*args, **options)
        if not sent:
            sent = True
            signal.raise_signal(signal.SIGUSR1)
        return result

    before = signal.signal(signal.SIGUSR1, _interrupt)
    try:
        with mock.patch(place, done):
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def adds_up_twice(world: World, name: str, size: int) -> str:
    """What rank 1 is told, which is interrupted behind the first block of its sum, when it waits again."""
    other, found, said = joined(world, name, "shared memory"), job_store(), ""
    assert found is not None
    told = PrefixStore(f"told {name}", found)
    x = other.empty(size, dtype=torch.float32).fill_(1.0)
    if world.rank != 1:
        told.wait(["begun"])  # or rank 1 would find the others there, and do its part in the call
        other.all_reduce(x, axes="rank")
        while not told.check(["told"]):
            other.progress()
            time.sleep(0.01)
        return said
    work = other.all_reduce(x, axes="rank")
    told.set("begun", "")
    with (
        _signalled_after("meshwise.comm.api.split_and_reduce.reduce_block", reduce_block),
        pytest.raises(Interruption),
    ):
        work.wait()
    try:
        work.wait()
    except RuntimeError as error:
        said = str(error)
    told.set("told", "")
    return said


@pytest.mark.parametrize("size", [8, 1_000_000])
def test_a_sum_that_was_interrupted_is_not_added_up_again(processes: Processes, size: int) -> None:
    told = run(SIZE, adds_up_twice, on=processes, args=(uuid.uuid4().hex, size))
    assert "rank 1 was interrupted while it added up in #0 all_reduce" in told[1]


def gathers_twice(world: World, name: str) -> list[float]:
    """What is only copied can be copied again."""
    other, found = joined(world, name, "shared memory"), job_store()
    assert found is not None
    told = PrefixStore(f"told {name}", found)
    x = torch.empty(SIZE * 100_000)
    if world.rank != 1:
        told.wait(["begun"])
    work = other.all_gather(torch.full((100_000,), 1.0 + world.rank), into=x, axes="rank")
    if world.rank == 1:
        told.set("begun", "")
        with (
            _signalled_after("meshwise.comm.shared_memory.local_world.copy", copy),
            pytest.raises(Interruption),
        ):
            work.wait()
    work.wait()
    other.close()
    values: list[float] = x.unique().tolist()
    return values


def test_what_was_interrupted_while_it_copied_is_copied_again(processes: Processes) -> None:
    assert run(SIZE, gathers_twice, on=processes, args=(uuid.uuid4().hex,)) == [[1.0, 2.0, 3.0]] * SIZE


def waits_twice(world: World, name: str) -> str:
    """What rank 1 is told, which is interrupted behind its messages, when it waits again."""
    other, said = joined(world, name, "gloo"), ""
    x = torch.ones(8)
    work = other.all_reduce(x, axes="rank")
    if world.rank == 1:
        with (
            _signalled_after("meshwise.comm.network.gloo_world.PendingMessages.wait", PendingMessages.wait),
            pytest.raises(Interruption),
        ):
            work.wait()
        with pytest.raises(RuntimeError, match="an earlier wait for this collective raised"):
            work.wait()
        said = "interrupted"
    else:
        work.wait()
        assert x.tolist() == [SIZE] * 8
    other.close()
    return said


def test_messages_that_were_interrupted_are_not_taken_for_done(processes: Processes) -> None:
    assert run(SIZE, waits_twice, on=processes, args=(uuid.uuid4().hex,)) == ["", "interrupted", ""]

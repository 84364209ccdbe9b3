"""Test that two threads of a rank that call collectives at once get an error, and that no sum is wrong."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not in torch's stubs

from joined_worlds import joined
from meshwise.comm.api.split_and_reduce import reduce_in_order
from meshwise.comm.api.world import World
from meshwise.comm.network.job_store import job_store
from meshwise.testing import run
from warm_processes import Processes

pytestmark = pytest.mark.processes

SIZE = 2


def calls_while_another_waits(world: World, name: str, how: str) -> None:
    other, found = joined(world, name, how), job_store()
    assert found is not None
    told = PrefixStore(f"told {name}", found)
    if world.rank:
        told.wait(["refused"])
        other.barrier()
    else:
        waiting = threading.Thread(target=other.barrier)
        waiting.start()
        while other.flight_recorder.position.waiting_since is None:
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="call the collectives of a rank from one thread at a time"):
            other.all_reduce(torch.ones(3), axes="rank")
        told.set("refused", "")
        waiting.join()
        assert other.flight_recorder.position.waiting_since is None
    x = torch.ones(3)
    other.all_reduce(x, axes="rank").wait()
    assert x.tolist() == [2.0] * 3
    other.close()


def comes_by_in_the_midst(world: World, name: str) -> str:
    """While one thread adds up, another one comes by; what that one is told."""
    other, said = joined(world, name, "shared memory"), [""]

    def progress() -> None:
        try:
            other.progress()
        except RuntimeError as error:
            said[0] = str(error)

    def slow(*args: Any, **options: Any) -> None:
        if not said[0]:
            said[0] = "nothing"
            thread = threading.Thread(target=progress)
            thread.start()
            thread.join()
        reduce_in_order(*args, **options)

    x = other.empty(100_000, dtype=torch.float32).fill_(world.rank + 1)
    with mock.patch("meshwise.comm.shared_memory.local_world.reduce_in_order", slow):
        other.all_reduce(x, axes="rank").wait()
    assert x.unique().tolist() == [3.0]
    other.close()
    return said[0]


@pytest.mark.parametrize("how", ["shared memory", "gloo"])
def test_a_thread_that_calls_while_another_waits_is_refused(processes: Processes, how: str) -> None:
    run(SIZE, calls_while_another_waits, on=processes, args=(uuid.uuid4().hex, how))


def test_a_thread_that_comes_by_while_another_adds_up_adds_nothing(processes: Processes) -> None:
    for rank, said in enumerate(run(SIZE, comes_by_in_the_midst, on=processes, args=(uuid.uuid4().hex,))):
        assert f"two threads of rank {rank} are at #" in said

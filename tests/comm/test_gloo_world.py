"""What messages promise beyond what every world does: they go on by themselves."""

from __future__ import annotations

import time
import uuid

import pytest
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not in torch's stubs

from meshwise.comm import World
from meshwise.comm.torch_world import meeting_place, torch_world
from meshwise.testing import Processes, run

pytestmark = pytest.mark.processes

SIZE = 4


def under_way_without_wait(world: World, name: str) -> float:
    """Rank 0 starts a two-phase all-reduce and does not wait; the others must get their results all the same."""
    found = meeting_place()
    assert found is not None
    gloo = torch_world(world.device, store=PrefixStore(name, found), comm="gloo")
    x = torch.ones(1 << 18)
    work = gloo.all_reduce(x, axes="rank")
    if world.rank == 0:
        time.sleep(1.0)
    start = time.monotonic()
    work.wait()
    waited = time.monotonic() - start
    gloo.close()
    return waited


def test_a_collective_goes_on_while_a_rank_does_something_else(processes: Processes) -> None:
    waited = run(SIZE, under_way_without_wait, on=processes, args=(uuid.uuid4().hex,))
    assert max(waited) < 0.5

"""Test that messages of the gloo world progress while the rank computes, which not every world promises."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not in torch's stubs

from meshwise.comm.api.world import World
from meshwise.comm.network.choose_world import process_world
from meshwise.comm.network.job_store import job_store
from meshwise.testing import run
from warm_processes import Processes

pytestmark = pytest.mark.processes

SIZE = 4


def under_way_without_wait(world: World, name: str, folder: str) -> int:
    """Rank 0 starts a two-phase all-reduce and does not wait; the others must get their results all the same."""
    found = job_store()
    assert found is not None
    gloo = process_world(world.device, store=PrefixStore(name, found), comm="gloo")
    x = torch.ones(1 << 18)
    work = gloo.all_reduce(x, axes="rank")
    done = Path(folder)
    ends = time.monotonic() + 100
    while world.rank == 0 and len(list(done.iterdir())) < world.size - 1 and time.monotonic() < ends:
        time.sleep(0.01)
    through = len(list(done.iterdir()))
    work.wait()
    (done / str(world.rank)).touch()
    gloo.close()
    return through


def test_a_collective_goes_on_while_a_rank_does_something_else(processes: Processes, tmp_path: Path) -> None:
    through = run(SIZE, under_way_without_wait, on=processes, args=(uuid.uuid4().hex, str(tmp_path)))
    assert through[0] == SIZE - 1

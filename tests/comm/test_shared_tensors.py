"""Test tensors in memory that the ranks of a group share."""

import contextlib
import gc
from pathlib import Path

import pytest
import torch

from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import World
from meshwise.testing import run
from warm_processes import Processes

pytestmark = pytest.mark.processes


def _memfds() -> int:
    count = 0
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # the one that the listing itself had open
            count += str(entry.readlink()).startswith("/memfd:meshwise-")
    return count


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:meshwise-")


def _hold(world: World) -> tuple[bool, list[float], list[float], int, int]:
    gc.collect()  # what jobs of the same processes before have let go of
    over = world.over(Mesh.of(dp=2, tp=2))
    first, before = over.shared_empty(8, dtype=torch.float64, axes="dp"), (_memfds(), _mapped())
    assert first is not None
    alone = over.shared_empty(8, dtype=torch.float64, axes=()) is None
    own = first[over.group("dp").index * 4 :][:4]
    own.fill_(world.rank)
    over.all_gather(own, into=first, axes="dp").wait()
    seen = first.tolist()
    over.barrier(axes="dp")
    # Given from elsewhere, this rank's part is put where the others look for it.
    over.all_gather(torch.full((4,), 10.0 + world.rank, dtype=torch.float64), into=first, axes="dp").wait()
    again = first.tolist()
    over.barrier(axes="dp")
    del first, own
    return alone, seen, again, _memfds() - before[0], _mapped() - before[1]


def test_what_a_rank_writes_is_there_for_all_and_nothing_is_left(processes: Processes) -> None:
    for rank, (alone, seen, again, files, maps) in enumerate(run(4, _hold, on=processes)):
        low, high = rank % 2, rank % 2 + 2
        assert alone
        assert seen == [low] * 4 + [high] * 4
        assert again == [10.0 + low] * 4 + [10.0 + high] * 4
        assert files == 0
        assert maps == -1

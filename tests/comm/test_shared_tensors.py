"""Test tensors in memory that the ranks of a group share."""

import contextlib
import gc
from pathlib import Path

import pytest
import torch

from meshwise.base.mesh import Mesh
from meshwise.comm.api.flight_recorder import RanksDisagree
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


def _gather(world: World, size: int, odd: str) -> list[float]:
    """Rank 1 gathers into what `odd` says, rank 0 into the first elements of what they hold together."""
    held, other = (world.shared_empty(50_000, dtype=torch.float64, axes="rank") for _ in range(2))
    assert held is not None
    assert other is not None
    own = torch.zeros(50_000, dtype=torch.float64)
    choices = {"the same": held, "its own": own, "other": other, "a shift": held[4:]}
    into = (choices[odd] if world.rank == 1 else held)[: 2 * size]
    part = torch.full((size,), 1.0 + world.rank, dtype=torch.float64)
    world.all_gather(part, into=into, axes="rank").wait()
    world.barrier()
    return sorted(set(into.tolist()))


@pytest.mark.parametrize("size", [8, 20_000])
@pytest.mark.parametrize("odd", ["its own", "other", "a shift"])
def test_ranks_that_pass_different_memory_get_an_error(odd: str, size: int, processes: Processes) -> None:
    with pytest.raises(RanksDisagree, match=r"passes a joint tensor, and rank \d other"):
        run(2, _gather, on=processes, args=(size, odd))
    assert run(2, _gather, on=processes, args=(size, "the same")) == [[1.0, 2.0]] * 2


def _gather_unequal(world: World) -> None:
    """Both ranks have the parts begin where the other has them, and take them to be of other sizes."""
    held = world.shared_empty(50_000, dtype=torch.float64, axes="rank")
    assert held is not None
    sizes = (2, 4) if world.rank else (4, 2)
    parts = [held[start : start + size] for start, size in zip((0, 10), sizes, strict=True)]
    world.all_gather(torch.ones_like(parts[world.rank]), into=parts, axes="rank").wait()


def test_ranks_that_pass_parts_of_other_sizes_get_an_error(processes: Processes) -> None:
    with pytest.raises(RanksDisagree, match="passes a joint tensor"):
        run(2, _gather_unequal, on=processes)

import pytest
import torch

from meshwise.comm.api.world import World
from meshwise.testing import run
from warm_processes import Processes


def ranks(world: World, scale: int) -> list[int]:
    x = torch.tensor([world.rank * scale])
    into = torch.empty(world.size, dtype=x.dtype)
    world.all_gather(x, into=into, axes=world.mesh.names).wait()
    return [int(value) for value in into.tolist()]


def test_threads_give_one_result_per_rank() -> None:
    assert run(3, ranks, args=(10,)) == [[0, 10, 20]] * 3


@pytest.mark.processes
def test_warm_processes_give_the_same(processes: Processes) -> None:
    assert run(4, ranks, on=processes, args=(10,)) == run(4, ranks, args=(10,))


@pytest.mark.processes
def test_processes_for_one_call_give_the_same() -> None:
    assert run(2, ranks, on="processes", args=(1,)) == [[0, 1]] * 2


def test_another_kind_of_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="on='fibres'"):
        run(2, ranks, on="fibres", args=(1,))

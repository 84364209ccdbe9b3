"""Test the NCCL world on the CPU, with gloo's process groups in place of NCCL's.

Parts of unequal size in one grouped exchange, which only NCCL supports, are tested on machines with GPUs."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import World
from meshwise.comm.network.job_store import job_store
from meshwise.comm.network.nccl_world import Backend, Communicators, NcclWorld
from meshwise.testing import run
from warm_processes import Processes

pytestmark = pytest.mark.processes

SIZE = 4


def gloo(store: c10d.Store) -> Backend:
    def make(purpose: str, ranks: tuple[int, ...], rank: int) -> c10d.ProcessGroup:
        own = c10d.PrefixStore(f"{purpose}{ranks}", store)
        backend = c10d.ProcessGroupGloo(own, ranks.index(rank), len(ranks), timedelta(minutes=3))
        group = c10d.ProcessGroup(own, ranks.index(rank), len(ranks))
        group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backend)
        return group

    return make


def over_c10d(world: World, name: str) -> NcclWorld:
    found = job_store()
    assert found is not None
    communicators = Communicators(gloo(c10d.PrefixStore(name, found)))
    return NcclWorld(rank=world.rank, mesh=world.mesh, device=torch.device("cpu"), communicators=communicators)


def collectives(world: World, name: str) -> None:
    world = over_c10d(world, name)
    everyone = range(SIZE)
    for op, expected in (("sum", 1 + 2 + 3 + 4), ("max", 4), ("min", 1)):
        x = torch.full((5,), world.rank + 1.0)
        world.all_reduce(x, axes="rank", op=op).wait()
        assert x.tolist() == [expected] * 5
        x = torch.full((5,), world.rank + 1.0)
        world.reduce(x, axes="rank", target=2, op=op).wait()
        assert world.rank != 2 or x.tolist() == [expected] * 5
    x = torch.full((2,), float(world.rank))
    world.broadcast(x, axes="rank", source=3).wait()
    assert x.tolist() == [3.0, 3.0]

    whole = torch.zeros(2 * SIZE)
    own = whole[2 * world.rank : 2 * world.rank + 2].fill_(world.rank)
    world.all_gather(own, into=whole, axes="rank").wait()
    assert whole.tolist() == [float(rank) for rank in everyone for _ in range(2)]
    part = torch.empty(2)
    world.reduce_scatter(whole, into=part, axes="rank").wait()
    assert part.tolist() == [4.0 * world.rank] * 2
    world.barrier()
    assert world.exchange(world.rank**2) == [0, 1, 4, 9]
    world.close()
    world.close()


def along_axes(world: World, name: str) -> list[float]:
    """Rank r counts 10^r, so a sum shows who took part."""
    mesh = over_c10d(world, name).over(Mesh.of(a=2, b=2))
    sums = []
    for axes in ("a", "b", ("b", "a")):
        x = torch.tensor([10.0**world.rank])
        mesh.all_reduce(x, axes=axes).wait()
        sums.append(x.item())
    mesh.close()
    return sums


def both_send_first(world: World, name: str) -> None:
    world = over_c10d(world, name)
    world.prepare(lines=[(rank, (rank + 1) % SIZE) for rank in range(SIZE)])
    to, source = (world.rank + 1) % SIZE, (world.rank - 1) % SIZE
    x, received = torch.full((3,), float(world.rank)), [torch.empty(3), torch.empty(3)]
    works = [
        world.send(x, axis="rank", to=to),
        world.send(x + 10, axis="rank", to=to),
        *[world.recv(y, axis="rank", source=source) for y in received],
    ]
    for work in works:
        work.wait()
    assert [y[0].item() for y in received] == [source, source + 10]
    world.close()


@pytest.mark.parametrize("main", [collectives, both_send_first])
def test_every_result_is_that_of_the_definition(main: Callable[[World, str], None], processes: Processes) -> None:
    run(SIZE, main, on=processes, args=(uuid.uuid4().hex,))


def test_a_group_is_the_ranks_along_its_axes(processes: Processes) -> None:
    assert run(SIZE, along_axes, on=processes, args=(uuid.uuid4().hex,)) == [
        [101.0, 11.0, 1111.0],
        [1010.0, 11.0, 1111.0],
        [101.0, 1100.0, 1111.0],
        [1010.0, 1100.0, 1111.0],
    ]

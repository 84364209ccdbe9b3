"""Test worlds on CUDA: ranks that share one GPU (gloo, pinned copies), NCCL on one GPU and on several GPUs.

To test streams, a long kernel runs before the operations that have to wait for it."""

from __future__ import annotations

import os
import uuid

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import World
from meshwise.comm.launch.launch import run
from meshwise.comm.network.choose_world import NCCL_SHARES_GPUS
from meshwise.comm.network.gloo_world import GlooWorld
from meshwise.comm.network.nccl_world import Communicators, NcclWorld, nccl

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")]

SHARED = GPUS > 0 and os.environ.get(NCCL_SHARES_GPUS) == "1"
LONG = 200_000_000  # cycles: a tenth of a second and more
LENGTHS = (1, 6, 1 << 18)


def late(x: Tensor) -> Tensor:
    """`x`, but only after a long kernel on the current stream."""
    torch.cuda._sleep(LONG)
    return x * 1


def held(rank: int, length: int) -> Tensor:
    return torch.arange(1.0, length + 1, device="cuda") * (rank + 1)


def same(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=0)


def collectives(world: World, kind: str) -> None:
    assert isinstance(world, GlooWorld if kind == "gloo" else NcclWorld)
    size, rank = world.size, world.rank
    total = sum(range(1, size + 1))
    for length in LENGTHS:
        x = late(held(rank, length))
        world.all_reduce(x, axes="rank").wait()
        same(x, held(0, length) * total)

        x = late(held(rank, length))
        world.reduce(x, axes="rank", target=1).wait()
        if rank == 1:
            same(x, held(0, length) * total)

        x = late(held(rank, length))
        world.broadcast(x, axes="rank", source=1).wait()
        same(x, held(1, length))

        whole = torch.empty(size * length, device="cuda")
        world.all_gather(late(held(rank, length)), into=whole, axes="rank").wait()
        same(whole, torch.cat([held(other, length) for other in range(size)]))

        part = torch.empty(length, device="cuda")
        world.reduce_scatter(late(whole), into=part, axes="rank").wait()
        same(part, held(rank, length) * size)

        received = torch.empty_like(whole)
        world.all_to_all(late(whole * (rank + 1)), into=received, axes="rank").wait()
        same(received, torch.cat([held(rank, length) * (other + 1) for other in range(size)]))

        gathered = torch.empty_like(whole) if rank == 0 else None
        world.gather(late(held(rank, length)), into=gathered, axes="rank").wait()
        world.scatter(gathered, into=part, axes="rank").wait()
        same(part, held(rank, length))
    world.barrier()
    assert world.exchange({"rank": rank}) == [{"rank": other} for other in range(size)]


def unequal_parts(world: World) -> None:
    sizes = [3 * index for index in range(world.size)]
    parts = [torch.empty(size, device="cuda") for size in sizes]
    world.all_gather(late(held(world.rank, sizes[world.rank])), into=parts, axes="rank").wait()
    for rank, part in enumerate(parts):
        same(part, held(rank, sizes[rank]))
    own = torch.empty(sizes[world.rank], device="cuda")
    world.reduce_scatter([late(held(world.rank, size)) for size in sizes], into=own, axes="rank").wait()
    same(own, held(0, len(own)) * sum(range(1, world.size + 1)))


def messages(world: World) -> None:
    to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    world.prepare(lines=[(rank, (rank + 1) % world.size) for rank in range(world.size)])
    received = [torch.empty(5, device="cuda") for _ in range(3)]
    works = [world.send(late(held(world.rank, 5) + index), axis="rank", to=to) for index in range(3)]
    works += [world.recv(x, axis="rank", source=source) for x in received]
    for work in works:
        work.wait()
    for index, x in enumerate(received):
        same(x, held(source, 5) + index)


def on_other_streams(world: World) -> None:
    """Started on one stream, waited for on another; inputs dropped and their memory reused in between."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    total = sum(range(1, world.size + 1))
    for _ in range(5):
        with torch.cuda.stream(first):
            x = late(held(world.rank, 1 << 18))
            whole = torch.empty(world.size << 18, device="cuda")
            works = [world.all_gather(x * 1, into=whole, axes="rank"), world.all_reduce(x, axes="rank")]
            overwritten = [torch.full((1 << 18,), -1.0, device="cuda") for _ in range(4)]
        with torch.cuda.stream(second):
            for work in works:
                work.wait()
            same(x, held(0, 1 << 18) * total)
            same(whole, torch.cat([held(rank, 1 << 18) for rank in range(world.size)]))
        torch.cuda.synchronize()
        assert all((y == -1).all() for y in overwritten)


def everything(world: World, kind: str) -> None:
    collectives(world, kind)
    unequal_parts(world)
    messages(world)
    on_other_streams(world)


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_share_a_gpu_are_joined_by_gloo(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv(NCCL_SHARES_GPUS, raising=False)
    run(size, everything, args=("gloo",), device="cuda")


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.skipif(not SHARED, reason="needs NCCL 2.30 or newer, and NCCL_MULTI_RANK_GPU_ENABLE=1")
def test_ranks_that_share_a_gpu_are_joined_by_nccl_if_it_may(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run(size, everything, args=("nccl",), device="cuda")


@pytest.mark.processes
@pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices, there are {GPUS}")
def test_ranks_with_a_gpu_each_are_joined_by_nccl() -> None:
    run(2, everything, args=("nccl",), device="cuda")


def test_nccl_on_a_group_of_one() -> None:
    """A world answers a group of one without communication, so the hooks are called past it."""
    store = HashStore()
    communicators = Communicators(nccl(c10d.PrefixStore(uuid.uuid4().hex, store)))
    world = NcclWorld(rank=0, mesh=Mesh.of(rank=1), device=torch.device("cuda", 0), communicators=communicators)
    group = world.group("rank")
    record = world._new_record("test", group, torch.empty(0))
    x, into = held(0, 6), torch.empty(6, device="cuda")
    world._all_reduce(record, group, x, "sum").wait()
    world._broadcast(record, group, x, 0).wait()
    world._reduce(record, group, x, (0, "max")).wait()
    for begin in (
        lambda: world._all_gather(record, group, late(x), [into]),
        lambda: world._reduce_scatter(record, group, [late(x)], (into, "sum")),
        lambda: world._move(record, group, {0: late(x)}, {0: into}),
    ):
        begin().wait()
        same(into, held(0, 6))
        into.zero_()
    world._barrier(record, group)
    world.close()

"""Test one rank of a traced world of any size."""

import time
from typing import Any

import pytest
import torch

from meshwise.base.mesh import Mesh
from meshwise.comm.in_process.thread_and_trace_worlds import TraceWorld
from meshwise.model.torch_private import TorchDispatchMode


class _Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_rank_of_65536_is_traced_at_once_on_meta_tensors() -> None:
    torch.empty(1, device="meta").copy_(torch.empty(1, device="meta"))  # makes torch import what meta tensors need
    started = time.process_time()
    world = TraceWorld(rank=40_000, mesh=Mesh.of(pp=16, dp=512, tp=8))
    whole = torch.empty(1 << 40, device="meta")
    with world.record() as records:
        world.all_gather(whole[: (1 << 40) // 512], into=whole, axes="dp").wait()
        world.reduce_scatter(whole, into=whole[: (1 << 40) // 512], axes="dp").wait()
        world.all_reduce(whole[:8], axes=("tp", "pp")).wait()
        world.all_reduce(whole[:1], axes=world.mesh.names, op="max").wait()
        world.send(whole[:6], axis="pp", to=0).wait()
        world.barrier()
    assert time.process_time() - started < 1
    assert [(record.kind, record.axes, record.bytes, record.how) for record in records] == [
        ("all_gather", ("dp",), 4 << 40, ""),
        ("reduce_scatter", ("dp",), 4 << 40, "sum"),
        ("all_reduce", ("pp", "tp"), 32, "sum"),
        ("all_reduce", ("pp", "dp", "tp"), 4, "max"),
        ("send", ("pp",), 24, "to 0"),
        ("barrier", ("pp", "dp", "tp"), 0, ""),
    ]
    assert records[0].site.startswith("comm/test_trace_world.py:")


def test_a_call_takes_as_many_operations_whatever_the_number_of_ranks() -> None:
    """On meta; a rehearsal sees every operation."""
    counts = []
    for ranks in (4, 512):
        world, whole = TraceWorld(rank=1, mesh=Mesh.of(dp=ranks)), torch.empty(1 << 20, device="meta")
        parts = [torch.empty(2, 3, device="meta") for _ in range(ranks)]
        with _Operations() as seen:
            world.all_gather(whole[: (1 << 20) // ranks], into=whole, axes="dp").wait()
            world.reduce_scatter(whole, into=whole[: (1 << 20) // ranks], axes="dp").wait()
            world.all_gather(parts[0], into=parts, axes="dp").wait()
        counts.append(seen.count)
    assert counts[0] == counts[1] > 0


def test_on_real_tensors_the_other_ranks_give_zeros() -> None:
    world = TraceWorld(rank=1, mesh=Mesh.of(dp=3), device="cpu")
    x = torch.tensor([4.0, -5.0])
    world.all_reduce(x, axes="dp").wait()
    assert x.tolist() == [4, -5]
    world.all_reduce(x, axes="dp", op="max").wait()
    assert x.tolist() == [4, 0]
    gathered = torch.full((6,), torch.nan)
    world.all_gather(x, into=gathered, axes="dp").wait()
    assert gathered.tolist() == [0, 0, 4, 0, 0, 0]
    part = torch.full((2,), torch.nan)
    world.reduce_scatter(torch.arange(6.0), into=part, axes="dp").wait()
    assert part.tolist() == [2, 3]
    received = torch.full((2,), torch.nan)
    world.recv(received, axis="dp", source=0).wait()
    assert received.tolist() == [0, 0]
    world.broadcast(x, axes="dp", source=1).wait()
    assert x.tolist() == [4, 0]
    world.broadcast(x, axes="dp", source=2).wait()
    assert x.tolist() == [0, 0]
    assert world.exchange("me", axes="dp") == ["me"] * 3


def test_a_view_over_another_mesh_writes_the_same_recorder() -> None:
    world = TraceWorld(rank=5, mesh=Mesh.of(rank=8))
    with world.record() as records:
        world.over(Mesh.of(dp=4, tp=2)).all_reduce(torch.empty(2, device="meta"), axes="tp").wait()
    assert [str(record).split(" at ")[0] for record in records] == ["#0 all_reduce[tp] sum 2 float32"]
    with pytest.raises(ValueError, match="the mesh dp=4 has 4 ranks, the world 8"):
        world.over(Mesh.of(dp=4))


def test_a_rank_outside_the_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank 8 in the mesh dp=8; its ranks are 0 to 7"):
        TraceWorld(rank=8, mesh=Mesh.of(dp=8))

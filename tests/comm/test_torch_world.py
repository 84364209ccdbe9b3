"""Test failures of real processes during collectives; `test_world_contract` tests the results."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from meshwise.base.mesh import Mesh
from meshwise.comm.api.world import World
from meshwise.testing import run
from warm_processes import Processes

pytestmark = pytest.mark.processes

SIZE = 4


def same(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=0)


def only_some(world: World) -> float | None:
    """The first group along b calls, the other does not."""
    mesh = world.over(Mesh.of(a=2, b=world.size // 2))
    if mesh.mesh.coordinate(world.rank)["a"] == 1:
        return None
    x = torch.ones(1)
    mesh.all_reduce(x, axes="b").wait()
    return x.item()


def one_order(world: World) -> tuple[Tensor, ...]:
    """The same random values through four routes to their sum."""
    generator = torch.Generator().manual_seed(world.rank)
    values = torch.randn(1 << 18, generator=generator)
    reduced, small, target = values.clone(), values[:4096].clone(), values.clone()
    part, whole = torch.empty(values.numel() // world.size), torch.empty_like(values)
    world.all_reduce(reduced, axes="rank").wait()
    world.all_reduce(small, axes="rank").wait()
    world.reduce(target, axes="rank").wait()
    world.reduce_scatter(values, into=part, axes="rank").wait()
    world.all_gather(part, into=whole, axes="rank").wait()
    return reduced, whole, small, target


def test_only_the_ranks_of_a_group_have_to_call(processes: Processes) -> None:
    assert run(SIZE, only_some, on=processes) == [2.0, 2.0, None, None]


def test_all_routes_to_a_sum_give_the_same_bits_on_every_rank(processes: Processes) -> None:
    results: Sequence[tuple[Tensor, ...]] = run(SIZE, one_order, on=processes)
    in_order = torch.stack([torch.randn(1 << 18, generator=torch.Generator().manual_seed(r)) for r in range(SIZE)])
    expected = ((in_order[0] + in_order[1]) + in_order[2]) + in_order[3]
    for reduced, whole, small, _ in results:
        same(reduced, expected)
        same(whole, expected)
        same(small, expected[:4096])
    same(results[0][3], expected)

"""Real processes: what must not go wrong under way. What every collective gives is in `test_world_contract`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from joined import joined
from meshwise.base.mesh import Mesh
from meshwise.comm import RanksDisagree, World
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


def disagreeing(world: World, name: str, how: str) -> str:
    """What is said to this rank. It is refused before anything moves, so that the ranks can go on."""
    other = joined(world, name, how)
    other.check = True
    x = torch.zeros(7 if world.rank == 2 else 8)
    other.all_reduce(torch.zeros(3), axes="rank").wait()
    with pytest.raises(RanksDisagree) as caught:
        other.over(world.mesh).all_reduce(x, axes="rank")
    assert len(set(world.exchange(other.digest("rank")))) == 1, "what was refused is not part of what they called"
    other.close()
    return str(caught.value)


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


@pytest.mark.parametrize("how", ["shared memory", "gloo"])
def test_check_mode_names_who_differs_before_anything_hangs(how: str, processes: Processes) -> None:
    for report in run(SIZE, disagreeing, on=processes, args=(uuid.uuid4().hex, how)):
        assert "rank 2 " in report
        assert "ranks 0,1,3" in report
        assert "all_reduce[rank] sum 7 float32" in report
        assert "test_torch_world.py" in report
